"""From hidden states and a head to the loss and all its gradients, a chunk of rows at a time.

A chunk is projected to logits once, turned in place into its own gradient, and multiplied back at once; no logits
outlive it. Backward only scales what forward left, so nothing is projected twice. Per chunk of R rows and side: one
(R, H) x (H, V) product forward, one (R, V) x (V, H) for the hidden gradient, one (V, R) x (R, H) for a head's.
On a CPU, with frozen heads, a chunk goes by tiles of the vocabulary (`fused_tiles`): the same products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lopd_fast.fused_chunk import ChunkInput
from lopd_fast.fused_filter import Explicit, GradFilter, Piece
from lopd_fast.fused_head import Head, Projection
from lopd_fast.fused_tiles import tile_columns
from lopd_fast.loss_backend import chunk_of
from lopd_fast.loss_checks import Rows
from lopd_fast.loss_rows import LossOptions, RowOutputs, concatenate, gradient_parts
from lopd_fast.out_of_memory import chunk_sizes_told
from lopd_fast.scratch import is_host, scratch

# What a chunk may hold: the logits of its sides and, on a device, their gradients. On a CPU it holds no more than the
# largest head does, unless that is less than LEAST_CHUNK_BYTES: more would not be faster.
CHUNK_BYTES, LEAST_CHUNK_BYTES = {"cpu": 320 << 20}, 64 << 20
CHUNK_BYTES_DEVICE = 900 << 20
TILE_ROWS = 1024  # most of a chunk that goes by tiles of the vocabulary: more gain nothing
DEVICE_ROWS = 128  # a chunk on a device is a multiple of this: whole tiles of its products


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
            unit = _unit(rows.weight)
            outputs = _chunk_loop(sides, served, rows, unit, options, chunk_size, grad_filter)
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
        ctx.save_for_backward(unit, *kept)
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
        unit, *saved = ctx.saved_tensors
        if grad_loss is not None:
            for i, (kept, like) in enumerate(zip(saved, ctx.like, strict=True)):
                if kept is not None:
                    shape, dtype = like
                    grads[i] = kept.mul(grad_loss * unit).to(dtype).view(shape)
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
    unit: Tensor,
    options: LossOptions,
    chunk_size: int | None,
    grad_filter: float | None,
) -> RowOutputs:
    """Projects and differentiates every chunk; the gradients of loss / unit gather in the sides and their heads."""
    count, heads = len(sides), [side.head for side in sides]
    # The two sides of a tied head that both want a gradient share the products that multiply it back.
    joint = count == 2 and heads[0] is heads[1] and all(side.differentiated for side in sides)
    learns = any(head.trains for head in heads)
    tiled = is_host(rows.weight.device) and not options.triton and not learns
    searched = 0 if served is not None else 1  # sides whose top-k are looked for
    held = searched if tiled and grad_filter is None else count
    step = _chunk_rows(heads, rows, options, chunk_size, held, tiled)
    wanted = [tiled and held < count and side.grad is not None for side in sides]
    weights = rows.weight / unit
    filters: list[GradFilter] = []
    if grad_filter is not None and rows.count:
        whole, largest = options.shard.group is None, weights.abs().amax()
        of_heads = {id(head): GradFilter(head, grad_filter, largest, whole) for head in heads}
        filters = [of_heads[id(head)] for head in heads]
    parts = []
    kind, width, columns = _kind(heads, rows, options), options.shard.width, tile_columns(step, heads)
    of_tile = step if held < count else 0
    with (
        chunk_sizes_told(rows.count, options.shard.total, step),
        scratch(rows.weight, (held * step, width), (of_tile, columns)) as (logits, tile),
    ):
        gradients = logits if kind is None else torch.empty_like(logits, dtype=kind)
        for start in range(0, max(rows.count, 1), step):
            part = slice(start, min(start + step, rows.count))
            size = part.stop - part.start
            hidden = [rows.pick_part(side.hidden, part) for side in sides]
            given = ChunkInput(
                hidden,
                heads,
                None if served is None else (served[0][part], served[1][part]),
                None if rows.labels is None else rows.labels[part],
                options,
                [logits[i * size : (i + 1) * size] for i in range(held)],
                tile,
                wanted,
            )
            chunk = chunk_of(options)(given)
            parts.append(chunk.record.outputs)
            weight = weights[part]
            margins = (None, None if rows.privilege_weight is None else -weight * rows.privilege_weight[part])
            if tiled:
                for i, (side, margin) in enumerate(zip(sides, margins, strict=False)):
                    if side.grad is not None and size:
                        if filters:
                            out = chunk.filtered_hidden_gradient(i, weight, margin, filters[i])
                        else:
                            out = chunk.hidden_gradient(i, weight, margin)
                        _put(side, rows, part, out)
                continue
            gradient = gradients[: count * size]
            explicit = []
            for i, (side, margin) in enumerate(zip(sides, margins, strict=False)):
                if side.differentiated:
                    chunk.gradient(i, weight, margin, gradient[i * size : (i + 1) * size])
                if filters:
                    record, ids, labels = chunk.record.sides[i], chunk.record.outputs.ids, chunk.labels
                    tail, kept, _ = gradient_parts(record, ids, weight, margin, labels, options.shard)
                    explicit.append((tail.sign(), kept))
            for group in [slice(0, 2)] if joint else [slice(i, i + 1) for i in range(count)]:
                of_group = gradient[group.start * size : group.stop * size]
                back = zip(filters[group], explicit[group], strict=True)
                _multiply_back(sides[group], of_group, hidden[group], rows, part, list(back))
    return concatenate(parts)


def _kind(heads: list[Head], rows: Rows, options: LossOptions) -> torch.dtype | None:
    """The dtype of gradients that are kept apart from logits, or None: they go over the logits.

    Kernels write gradients that a device multiplies as halves in that precision.
    """
    kinds = {head.operand if options.triton and head.native else rows.weight.dtype for head in heads}
    kind = kinds.pop() if len(kinds) == 1 else rows.weight.dtype
    return None if kind == rows.weight.dtype else kind


def _chunk_rows(
    heads: list[Head], rows: Rows, options: LossOptions, chunk_size: int | None, held: int, tiled: bool
) -> int:
    """Rows of a chunk that holds the logits of `held` sides."""
    if chunk_size is None:
        kind = _kind(heads, rows, options)
        itemsize = rows.weight.itemsize + (kind.itemsize if kind else 0)
        per_row = itemsize * max(options.shard.widths) * held
        host, budget = is_host(rows.weight.device), CHUNK_BYTES_DEVICE
        if host:
            hidden = max(head.weight.shape[1] for head in heads)
            # Of the widest shard: every process must cut the same chunks.
            largest = max(options.shard.widths) * hidden * rows.weight.itemsize
            budget = min(CHUNK_BYTES["cpu"], max(largest, LEAST_CHUNK_BYTES))
        most = max(1, budget // max(1, per_row))
        if tiled:
            most = min(most, TILE_ROWS)
        if not host and most > DEVICE_ROWS:
            chunk_size = most // DEVICE_ROWS * DEVICE_ROWS
        else:
            chunk_size = -(-rows.count // -(-rows.count // most)) if rows.count else 1  # chunks of one size
    return max(1, min(chunk_size, rows.count))


def _multiply_back(
    sides: list[Side],
    gradient: Tensor,
    hidden: list[Tensor],
    rows: Rows,
    part: slice,
    filters: list[tuple[GradFilter, tuple[Tensor, Tensor]]],
) -> None:
    """From gradient  # (sides * R, V) of one head's logits to the hidden states of its sides and to the head itself.

    filters  # one a side, with the sign (R,) of its tail's gradient and the columns (R, m) of explicit values, or none
    """
    head, count = sides[0].head, part.stop - part.start
    if head.trains:
        head.add_gradients(gradient, torch.cat(hidden))
    wanted = [i for i, side in enumerate(sides) if side.grad is not None]
    if not (wanted and count):
        return
    if not filters:
        first, last = wanted[0], wanted[-1] + 1
        products = head.hidden_gradient(gradient[first * count : last * count]).split(count)
        for side, out in zip(sides[first:last], products, strict=True):
            _put(side, rows, part, out)
        return
    # One side at a time: fewer rows leave fewer columns, and the two sides' gradients differ in size.
    for i in wanted:
        of_side, (grad_filter, (sign, kept)) = gradient[i * count : (i + 1) * count], filters[i]
        piece = Piece(slice(0, of_side.shape[1]), None, sign)
        out = grad_filter.hidden_gradient(of_side, [piece], Explicit(kept, apart=None))
        _put(sides[i], rows, part, head.hidden_gradient(of_side) if out is None else out)


def _put(side: Side, rows: Rows, part: slice, grad: Tensor) -> None:
    """Writes a chunk's grad  # (R, H) where its rows stand."""
    assert side.grad is not None
    if rows.index is None:
        side.grad[part] = grad
    else:
        side.grad.index_copy_(0, rows.index[part], grad.to(side.grad.dtype))


def _unit(weight: Tensor) -> Tensor:
    """A power of 2 from 1/64 to 1/32 of the largest |weight|, () like weight; 1 if nothing counts.

    Gradients are formed in units of it, so that they fit fp16 whatever Z is; as a power of 2 it changes no bit in fp32.
    """
    if not len(weight):
        return weight.new_ones(())
    return torch.ldexp(weight.new_ones(()), torch.frexp(weight.abs().amax()).exponent - 6)
