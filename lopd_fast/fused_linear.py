"""From hidden states and a head to the loss and all its gradients, a chunk of rows at a time.

A chunk is projected to logits once, turned in place into its own gradient, and multiplied back at once; no logits
outlive it. Backward only scales what forward left, so nothing is projected twice. Per chunk of R rows and side: one
(R, H) x (H, V) product forward, one (R, V) x (V, H) for the hidden gradient, one (V, R) x (R, H) for a head's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lopd_fast.fused_head import Head, Projection
from lopd_fast.loss_checks import Rows
from lopd_fast.loss_rows import (
    LossOptions,
    RowOutputs,
    concatenate,
    finish_gradient_,
    rows_forward_,
)

LOGITS_BYTES = {"cpu": 300 << 20}  # the logits of both sides of a chunk
LOGITS_BYTES_DEVICE = 1 << 30


@dataclass(frozen=True)
class Side:
    """The hidden states of one side, over flattened rows, and what becomes of them."""

    hidden: Tensor  # (N, H)
    head: Head
    grad: Tensor | None  # (N, H) zeros to fill, if hidden states want a gradient

    @property
    def differentiated(self) -> bool:
        return self.grad is not None or self.head.trains


class FusedLinearLoss(torch.autograd.Function):
    """Hidden states and heads -> loss (differentiable) and the outputs per row (not).

    The gradients of loss are formed in forward and kept, in the dtype of their tensors, until backward scales them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        student_hidden: Tensor,
        student_weight: Tensor,
        student_bias: Tensor | None,
        teacher_hidden: Tensor | None,
        teacher_weight: Tensor | None,
        teacher_bias: Tensor | None,
        wanted: tuple[bool, ...],
        served: tuple[Tensor, Tensor] | None,
        rows: Rows,
        options: LossOptions,
        projection: Projection,
        chunk_size: int | None,
        grad_filter: float | None,
        autocast: torch.dtype | None,
    ):
        inputs = (student_hidden, student_weight, student_bias, teacher_hidden, teacher_weight, teacher_bias)
        dtype, device, shard = rows.weight.dtype, student_hidden.device, options.shard
        tied = teacher_hidden is not None and teacher_weight is None
        with torch.autocast(device.type, enabled=False):
            sides: list[Side] = []
            for hidden, weight, bias, want in ((*inputs[:3], wanted[:3]), (*inputs[3:], wanted[3:])):
                if hidden is None:
                    continue
                if weight is None:
                    head = sides[0].head
                else:
                    users = (student_hidden, teacher_hidden) if tied else (hidden,)
                    operand = _operand_dtype(weight, users, autocast, dtype)
                    head = Head(
                        weight, bias, projection, options.temperature, operand, dtype, (want[1], want[2])
                    )
                sides.append(_side(hidden, head, want[0], keep_wide=shard.group is not None))
            outputs = _chunk_loop(sides, served, rows, options, chunk_size, grad_filter)
            grads = [sides[0].grad, sides[0].head.weight_grad, sides[0].head.bias_grad, None, None, None]
            if len(sides) == 2:
                grads[3] = sides[1].grad
                if not tied:
                    grads[4:] = [sides[1].head.weight_grad, sides[1].head.bias_grad]
            for i in (0, 3):
                if grads[i] is not None:
                    grads[i] = shard.sum(grads[i])
        kept = list(grads)
        for i, (x, grad) in enumerate(zip(inputs, grads, strict=True)):
            # fp16 would lose what a loss scaler is about to multiply: it stays in fp32 until then.
            if x is not None and grad is not None and x.dtype != torch.float16:
                kept[i] = grad.to(x.dtype)
        ctx.save_for_backward(*kept)
        ctx.like = [None if x is None else (x.shape, x.dtype) for x in inputs]
        ctx.set_materialize_grads(False)

        value = outputs.kl
        if rows.privilege_weight is not None and outputs.privilege is not None:
            value = value - rows.privilege_weight * outputs.privilege
        ctx.mark_non_differentiable(*(x for x in outputs.tensors() if x is not None))
        return (rows.weight * value).sum(), *outputs.tensors()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor | None, *_: Any):
        grads: list[Tensor | None] = [None] * 6
        if grad_loss is not None:
            for i, (kept, like) in enumerate(zip(ctx.saved_tensors, ctx.like, strict=True)):
                if kept is not None:
                    shape, dtype = like
                    grads[i] = kept.mul(grad_loss).to(dtype).view(shape)
        return *grads, *[None] * 8


def _operand_dtype(
    weight: Tensor, users: tuple[Tensor | None, ...], autocast: torch.dtype | None, dtype: torch.dtype
) -> torch.dtype:
    """What a head's products take: the autocast dtype, else what its tensors promote to; fp64 is never rounded."""
    if dtype == torch.float64:
        return dtype
    if autocast is not None:
        return autocast
    operand = weight.dtype
    for hidden in users:
        if hidden is not None:
            operand = torch.promote_types(operand, hidden.dtype)
    return operand


def _side(hidden: Tensor, head: Head, wanted: bool, keep_wide: bool) -> Side:
    """Gradients of bf16 rows are kept in bf16, unless a sum over processes is still to come. fp16 stays in fp32 until
    backward, for a loss scaler's factor comes only then and small values would underflow."""
    hidden = hidden.reshape(-1, hidden.shape[-1])
    kept = hidden.dtype if hidden.dtype == torch.bfloat16 and not keep_wide else head.dtype
    return Side(hidden, head, hidden.new_zeros(hidden.shape, dtype=kept) if wanted else None)


def _chunk_loop(
    sides: list[Side],
    served: tuple[Tensor, Tensor] | None,
    rows: Rows,
    options: LossOptions,
    chunk_size: int | None,
    grad_filter: float | None,
) -> RowOutputs:
    """Projects and differentiates every chunk; gradients gather in the sides and their heads."""
    dtype, width = rows.weight.dtype, options.shard.width
    tied = len(sides) == 2 and sides[0].head is sides[1].head
    held = (
        max(options.shard.widths) * len(sides) + 32 * options.k
    )  # numbers per row, those that k brings included
    step = _chunk_rows(chunk_size, rows.count, held, dtype, rows.weight.device)
    buffer = rows.weight.new_empty(len(sides) * min(step, rows.count), width)
    forward_, finish_ = _row_functions(options)
    parts = []
    for start in range(0, max(rows.count, 1), step):
        part = slice(start, min(start + step, rows.count))
        count = part.stop - start
        labels = None if rows.labels is None else rows.labels[part]
        hidden = [rows.pick_part(side.hidden, part) for side in sides]
        # One product a side, although a tied head could share one: a product's rounding may depend on where in it a
        # row stands, and equal hidden states are to give equal logits.
        logits = [buffer[i * count : (i + 1) * count] for i in range(len(sides))]
        for side, h, out in zip(sides, hidden, logits, strict=True):
            side.head.project(h, out)
        slopes = [
            side.head.slope(x) if side.differentiated else None for side, x in zip(sides, logits, strict=True)
        ]
        record, *shifts = forward_(
            logits[0],
            logits[1] if len(logits) == 2 else None,
            None if served is None else (served[0][part], served[1][part]),
            labels,
            options,
        )
        parts.append(record.outputs)
        margins = (None, rows.privilege_weight)
        records = (record.student, record.teacher)
        for side, x, slope, side_record, shift, margin in zip(
            sides, logits, slopes, records, shifts, margins, strict=False
        ):
            if side.differentiated:
                assert side_record is not None
                weight = rows.weight[part] * side.head.chain
                margin = None if margin is None else -weight * margin[part]
                finish_(x, shift, side_record, record.outputs.ids, weight, margin, labels, options.shard)
                if slope is not None:
                    x.mul_(slope)
        del slopes
        if tied and all(side.differentiated for side in sides):
            _multiply_back(sides, buffer[: 2 * count], hidden, rows, part, grad_filter)
        else:
            for i, side in enumerate(sides):
                if side.differentiated:
                    _multiply_back([side], logits[i], hidden[i : i + 1], rows, part, grad_filter)
    return concatenate(parts)


def _row_functions(options: LossOptions) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What makes the record of a chunk, and what turns the chunk into its gradient."""
    if options.triton:
        from lopd_fast import triton_rows  # imports triton

        return triton_rows.rows_forward_, triton_rows.finish_gradient_
    return rows_forward_, finish_gradient_


def _multiply_back(
    sides: list[Side], grad: Tensor, hidden: list[Tensor], rows: Rows, part: slice, grad_filter: float | None
) -> None:
    """From grad  # (sides * R, V) of one head to the hidden states of its sides and to the head itself."""
    head, count = sides[0].head, part.stop - part.start
    if head.trains:
        head.add_gradients(grad, torch.cat(hidden))
    wanted = [i for i, side in enumerate(sides) if side.grad is not None]
    if not (wanted and count):
        return
    first, last = wanted[0], wanted[-1] + 1
    grad = grad[first * count : last * count]
    if grad_filter is None:
        products = head.hidden_gradient(grad).split(count)
    else:  # one side at a time: fewer rows leave fewer columns, and the two sides' gradients differ in size
        scale = rows.weight.abs().amax()  # the filter is on gradients ahead of token weights and Z
        products = [head.filtered_hidden_gradient(part, grad_filter, scale) for part in grad.split(count)]
    for side, out in zip(sides[first:last], products, strict=True):
        assert side.grad is not None
        if rows.index is None:
            side.grad[part] = out
        else:
            side.grad.index_copy_(0, rows.index[part], out.to(side.grad.dtype))


def _chunk_rows(
    chunk_size: int | None, count: int, held: int, dtype: torch.dtype, device: torch.device
) -> int:
    """Rows per chunk, for `held` numbers a row."""
    if chunk_size is not None:
        return chunk_size
    budget = LOGITS_BYTES.get(device.type, LOGITS_BYTES_DEVICE)
    most = max(1, budget // (held * dtype.itemsize))
    return -(-count // -(-count // most)) if count else 1  # chunks of one size
