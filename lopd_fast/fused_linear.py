"""From hidden states and a head to the loss and all its gradients, a chunk of rows at a time.

A chunk is projected to logits once, turned in place into its own gradient, and multiplied back at once; no logits
outlive it. Backward only scales what forward left, so nothing is projected twice. Per chunk of R rows and side: one
(R, H) x (H, V) product forward, one (R, V) x (V, H) for the hidden gradient, one (V, R) x (R, H) for a head's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lopd_fast.loss_checks import Rows
from lopd_fast.loss_rows import LossOptions, RowRecord, finish_gradient_, rows_forward_
from lopd_fast.loss_support import VocabShard

LOGITS_BYTES = {"cpu": 160 << 20}  # the logits of both sides of a chunk
LOGITS_BYTES_DEVICE = 1 << 30
WEIGHT_ROWS = 8192  # rows of a half-precision weight that a CPU widens at a time
HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Projection:
    """logits = softcap(logit_scale * (h W^T + b)), and what chunks to take."""

    logit_scale: float
    logit_softcap: float | None
    chunk_size: int | None


class Head:
    """An output head: projects rows to logits over the temperature, multiplies gradients back.

    `gain` is the factor on h W^T + b ahead of the soft-cap or, without one, of everything.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        projection: Projection,
        temperature: float,
        dtype: torch.dtype,
    ) -> None:
        self.weight, self.bias, self.dtype = weight, bias, dtype
        self.cap, self.temperature = projection.logit_softcap, temperature
        self.gain = projection.logit_scale / (temperature if self.cap is None else self.cap)
        # d logits-over-temperature / d (h W^T + b), up to the soft-cap's slope
        self.chain = projection.logit_scale / temperature
        self.weight_grad: Tensor | None = None
        self.bias_grad: Tensor | None = None

    def want_gradients(self, weight: bool, bias: bool) -> None:
        """Allocates the sums over chunks, in fp32 (or fp64) whatever the dtype of the head."""
        if weight:
            self.weight_grad = torch.zeros(self.weight.shape, dtype=self.dtype, device=self.weight.device)
        if bias:
            self.bias_grad = torch.zeros(self.weight.shape[0], dtype=self.dtype, device=self.weight.device)

    def _blocks(self, operand: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        """The weight in the dtype of the sums, rounded to the operands' first; whole if that takes no copy."""
        width = self.weight.shape[0]
        step = width if self.weight.dtype == operand == self.dtype else WEIGHT_ROWS
        for start in range(0, width, step):
            part = slice(start, min(start + step, width))
            yield part, self.weight[part].to(operand).to(self.dtype)

    def project(self, hidden: Tensor, operand: torch.dtype, out: Tensor) -> Tensor:
        """Writes the logits over the temperature of hidden  # (R, H) to out  # (R, V)."""
        if hidden.is_cuda and operand in HALF:
            torch.mm(hidden.to(operand), self.weight.to(operand).t(), out_dtype=self.dtype, out=out)
        else:
            hidden = hidden.to(operand).to(self.dtype)
            for part, weight in self._blocks(operand):
                torch.mm(hidden, weight.t(), out=out[:, part])
        if self.bias is not None:
            out.add_(self.bias.to(self.dtype))
        if self.gain != 1:
            out.mul_(self.gain)
        if self.cap is not None:
            out.tanh_().mul_(self.cap / self.temperature)
        return out

    def slope(self, logits: Tensor) -> Tensor | None:
        """d softcap(x) / dx from the capped logits over the temperature  # (R, V), None without a soft-cap."""
        if self.cap is None:
            return None
        return logits.mul(self.temperature / self.cap).square_().neg_().add_(1)

    def multiply_back(
        self, grad: Tensor, hidden: Tensor, operand: torch.dtype, want_hidden: bool
    ) -> Tensor | None:
        """Adds this chunk to the head's sums; returns the gradient  # (R, H) of hidden, if it is wanted."""
        if self.bias_grad is not None:
            self.bias_grad.add_(grad.sum(0))
        half = grad.is_cuda and operand in HALF
        if half:
            grad = grad.to(operand)
        if self.weight_grad is not None:
            if half:
                self.weight_grad.add_(torch.mm(grad.t(), hidden.to(operand), out_dtype=self.dtype))
            else:
                self.weight_grad.addmm_(grad.t(), hidden.to(operand).to(self.dtype))
        if not want_hidden:
            return None
        if half:
            return torch.mm(grad, self.weight.to(operand), out_dtype=self.dtype)
        out = None
        for part, weight in self._blocks(operand):
            product = torch.mm(grad[:, part], weight)
            out = product if out is None else out.add_(product)
        return out


class Side:
    """The hidden states of one side (N, H), read and differentiated a chunk of rows at a time."""

    def __init__(
        self,
        hidden: Tensor,
        head: Head,
        rows: Rows,
        wanted: bool,
        autocast: torch.dtype | None,
        shard: VocabShard,
    ) -> None:
        self.hidden, self.head, self.rows = hidden.reshape(-1, hidden.shape[-1]), head, rows
        self.operand = autocast or torch.promote_types(hidden.dtype, head.weight.dtype)
        if head.dtype == torch.float64:
            self.operand = torch.float64
        # A vocabulary-parallel gradient is a sum over processes, so it stays in fp32 until then; fp16 waits for the
        # factor of a loss scaler, without which it would underflow.
        self.grad: Tensor | None = None
        if wanted:
            kept = hidden.dtype if hidden.dtype == torch.bfloat16 and shard.group is None else head.dtype
            self.grad = torch.zeros(self.hidden.shape, dtype=kept, device=hidden.device)

    def chunk(self, part: slice) -> Tensor:
        return (
            self.hidden[part]
            if self.rows.index is None
            else self.hidden.index_select(0, self.rows.index[part])
        )

    def multiply_back(self, grad: Tensor, hidden: Tensor, part: slice) -> None:
        """Takes the gradient of the logits  # (R, V) of a chunk to the hidden states and the head."""
        out = self.head.multiply_back(grad, hidden, self.operand, self.grad is not None)
        if out is None or self.grad is None:
            return
        if self.rows.index is None:
            self.grad[part] = out
        else:
            self.grad.index_copy_(0, self.rows.index[part], out.to(self.grad.dtype))


def _chunk_rows(
    chunk_size: int | None, count: int, widest: int, sides: int, dtype: torch.dtype, device: torch.device
) -> int:
    if chunk_size is not None:
        return chunk_size
    budget = LOGITS_BYTES.get(device.type, LOGITS_BYTES_DEVICE)
    most = max(1, budget // (widest * sides * (8 if dtype == torch.float64 else 4)))
    return -(-count // -(-count // most)) if count else 1  # chunks of one size


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
        autocast: torch.dtype | None,
    ):
        inputs = (student_hidden, student_weight, student_bias, teacher_hidden, teacher_weight, teacher_bias)
        dtype, device, shard = rows.weight.dtype, student_hidden.device, options.shard
        with torch.autocast(device.type, enabled=False):
            student_head = Head(student_weight, student_bias, projection, options.temperature, dtype)
            student_head.want_gradients(wanted[1], wanted[2])
            sides = [Side(student_hidden, student_head, rows, wanted[0], autocast, shard)]
            if teacher_hidden is not None:
                head = student_head
                if teacher_weight is not None:
                    head = Head(teacher_weight, teacher_bias, projection, options.temperature, dtype)
                    head.want_gradients(wanted[4], wanted[5])
                sides.append(Side(teacher_hidden, head, rows, wanted[3], autocast, shard))
            record = _chunk_loop(sides, served, rows, options, projection.chunk_size)
            grads = [sides[0].grad, student_head.weight_grad, student_head.bias_grad, None, None, None]
            if len(sides) == 2:
                grads[3] = sides[1].grad
                if teacher_weight is not None:
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

        loss = rows.weight * record.kl
        privilege = None
        if record.student_logprob is not None and record.teacher_logprob is not None:
            privilege = record.teacher_logprob - record.student_logprob
            if rows.privilege_weight is not None:
                loss = loss - rows.weight * rows.privilege_weight * privilege
        fixed = (
            record.kl,
            privilege,
            record.ids,
            record.student_mass,
            record.teacher_mass,
            record.student_logprob,
            record.teacher_logprob,
        )
        ctx.mark_non_differentiable(*(x for x in fixed if x is not None))
        return loss.sum(), *fixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor | None, *_: Any):
        grads: list[Tensor | None] = [None] * 6
        if grad_loss is not None:
            for i, (kept, like) in enumerate(zip(ctx.saved_tensors, ctx.like, strict=True)):
                if kept is not None:
                    shape, dtype = like
                    grads[i] = kept.mul(grad_loss).to(dtype).view(shape)
        return *grads, None, None, None, None, None, None


def _chunk_loop(
    sides: list[Side],
    served: tuple[Tensor, Tensor] | None,
    rows: Rows,
    options: LossOptions,
    chunk_size: int | None,
) -> RowRecord:
    """Runs every chunk; gradients gather in the sides and heads."""
    shard, labels = options.shard, rows.labels
    dtype, device = rows.weight.dtype, rows.weight.device
    step = _chunk_rows(chunk_size, rows.count, max(shard.widths), len(sides), dtype, device)
    buffers = [torch.empty(min(step, rows.count), shard.width, dtype=dtype, device=device) for _ in sides]
    differentiate = [
        s.grad is not None or s.head.weight_grad is not None or s.head.bias_grad is not None for s in sides
    ]
    parts = []
    for start in range(0, max(rows.count, 1), step):
        part = slice(start, min(start + step, rows.count))
        hidden = [side.chunk(part) for side in sides]
        logits = [
            side.head.project(h, side.operand, buffer[: len(h)])
            for side, h, buffer in zip(sides, hidden, buffers, strict=True)
        ]
        slopes = [
            s.head.slope(x) if wanted else None
            for s, x, wanted in zip(sides, logits, differentiate, strict=True)
        ]
        record, *shifts = rows_forward_(
            logits[0],
            logits[1] if served is None else None,
            None if served is None else (served[0][part], served[1][part]),
            None if labels is None else labels[part],
            options,
        )
        parts.append(record)
        for i, side in enumerate(sides):
            if not differentiate[i]:
                continue
            side_record = record.student if i == 0 else record.teacher
            assert side_record is not None
            weight = rows.weight[part] * side.head.chain
            margin = None
            if i == 1 and rows.privilege_weight is not None:
                margin = -weight * rows.privilege_weight[part]
            grad = finish_gradient_(
                logits[i],
                shifts[i],
                side_record,
                record.ids,
                weight,
                margin,
                None if labels is None else labels[part],
                shard,
            )
            slope = slopes[i]
            if slope is not None:
                grad.mul_(slope)
            side.multiply_back(grad, hidden[i], part)
    return RowRecord.cat(parts)
