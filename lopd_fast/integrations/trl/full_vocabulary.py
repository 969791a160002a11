"""Divergences over the whole vocabulary from hidden states, a chunk of rows at a time.

`fused_linear_topk_tail_kl` with k = V is exact too, but returns k ids a row and so holds (N, V) numbers after all.
Where a trainer's loss has no top-k, this is its exact and lean form: as in `lopd_fast.fused_linear`, a chunk is
projected, turned into its gradient and multiplied back at once, so that nothing is projected twice. The teacher is a
constant.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lopd_fast.fused_head import Head
from lopd_fast.integrations.trl.heads import HeadInput
from lopd_fast.loss_divergence import bucket_divergence

CHUNK_BYTES, CHUNK_BYTES_DEVICE = {"cpu": 128 << 20}, 512 << 20  # the logits of both sides of a chunk
SCRATCH_BYTES, SCRATCH_BYTES_DEVICE = (
    {"cpu": 32 << 20},
    256 << 20,
)  # what turns some rows of it into gradients
HELD = 14  # (R, V) tensors that the divergence of R rows holds at once


@dataclass(frozen=True)
class FullDivergence:
    """What `full_divergence` returns; rows of weight 0 hold 0. fp32, or fp64 for fp64 inputs."""

    loss: Tensor  # () differentiable
    kl: Tensor  # (B, T)
    entropy: Tensor  # (B, T) of the student, nats


def _parts(count: int, row_bytes: int, budget: int) -> Iterator[slice]:
    """As many rows at a time as the budget holds."""
    step = max(1, budget // row_bytes)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def _head(side: HeadInput, temperature: float, wanted: tuple[bool, bool] = (False, False)) -> Head:
    """Products take the autocast dtype, else that of the hidden states, as the head itself would."""
    device = side.hidden.device.type
    operand = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else side.hidden.dtype
    dtype = torch.float64 if side.hidden.dtype == torch.float64 else torch.float32
    if dtype == torch.float64:
        operand = dtype
    return Head(side.weight, side.bias, side.projection, temperature, operand, dtype, wanted)


class _FullDivergence(torch.autograd.Function):
    """Rows that count -> loss (differentiable in hidden, weight and bias of the student), kl and entropy (not)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # (R, H)
        weight: Tensor,  # (V, H)
        bias: Tensor | None,
        student: Head,
        teacher: Head,
        teacher_hidden: Tensor,  # (R, H')
        row_weight: Tensor,  # (R,)
        wanted: bool,
        divergence: str,
        beta: float,
    ):
        ctx.set_materialize_grads(False)
        count, width, kind = len(hidden), len(weight), hidden.device.type
        row_bytes = width * student.dtype.itemsize
        kl, entropy = row_weight.new_empty(2, count)
        hidden_grad = hidden.new_zeros(hidden.shape, dtype=student.dtype) if wanted else None
        row_scale = row_weight * student.chain
        with torch.autocast(kind, enabled=False):
            for part in _parts(count, 2 * row_bytes, CHUNK_BYTES.get(kind, CHUNK_BYTES_DEVICE)):
                rows = hidden[part]
                logits = row_weight.new_empty(2, len(rows), width)
                for head, side, out in (
                    (student, rows, logits[0]),
                    (teacher, teacher_hidden[part], logits[1]),
                ):
                    head.multiply(side, out)
                    head.to_logits_(out)
                kl[part], entropy[part] = _to_gradient_(logits, row_scale[part], student, divergence, beta)
                if student.trains:
                    student.add_gradients(logits[0], rows)
                if hidden_grad is not None:
                    hidden_grad[part] = student.hidden_gradient(logits[0])
        ctx.save_for_backward(hidden_grad, student.weight_grad, student.bias_grad)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(kl, entropy)
        return (row_weight * kl).sum(), kl, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor | None, *_: Any):
        grads: list[Tensor | None] = [None, None, None]
        if grad_loss is not None:
            for i, (kept, dtype) in enumerate(zip(ctx.saved_tensors, ctx.dtypes, strict=True)):
                if kept is not None:
                    grads[i] = kept.mul(grad_loss).to(dtype)
        return *grads, *[None] * 7


def _to_gradient_(
    logits: Tensor, scale: Tensor, head: Head, divergence: str, beta: float
) -> tuple[Tensor, Tensor]:
    """Turns the student's logits, the first of logits  # (2, R, V), into scale  # (R,) times dD / d(h W^T + b).

    Returns D and the student's entropy, both (R,).
    """
    budget = SCRATCH_BYTES.get(logits.device.type, SCRATCH_BYTES_DEVICE)
    kl, entropy = torch.empty_like(scale), torch.empty_like(scale)
    for rows in _parts(len(scale), HELD * logits.shape[2] * logits.itemsize, budget):
        z, u = logits[:, rows]
        slope, s = head.slope(z), z.log_softmax(-1)
        result = bucket_divergence(s, u.log_softmax(-1), divergence, beta, complete=True)
        torch.mul(result.student, scale[rows, None], out=z)
        if slope is not None:
            z.mul_(slope)
        kl[rows], entropy[rows] = result.value, torch.special.entr(s.exp_()).sum(-1)
    return kl, entropy


def full_divergence(
    student: HeadInput,
    teacher: HeadInput,
    *,
    token_weight: Tensor,
    divergence: str,
    beta: float,
    temperature: float = 1.0,
) -> FullDivergence:
    """sum_n w_n D_n over the whole vocabulary, D one of `lopd_fast.topk_tail_kl`'s divergences.

    Args:
        student: gets gradients in hidden states, weight and bias.
        teacher: a constant; its width, scale and soft-cap may be its own.
        token_weight: (B, T), a constant that holds the mask and the normaliser; rows of weight 0 are not projected.
        divergence, beta, temperature: as in `lopd_fast.topk_tail_kl`.

    Raises:
        ValueError: for sides of different rows or vocabularies, naming the sizes.
    """
    lead = student.hidden.shape[:-1]
    if teacher.hidden.shape[:-1] != lead or token_weight.shape != lead:
        raise ValueError(
            f"the student has rows {tuple(lead)}, the teacher {tuple(teacher.hidden.shape[:-1])} and the mask "
            f"{tuple(token_weight.shape)}: row n must be the same token on all"
        )
    if student.weight.shape[0] != teacher.weight.shape[0]:
        raise ValueError(
            f"the student's head has {student.weight.shape[0]} ids and the teacher's {teacher.weight.shape[0]}: a "
            "divergence over the whole vocabulary needs one vocabulary"
        )
    index = token_weight.flatten().nonzero().squeeze(1)
    grad = torch.is_grad_enabled()
    hidden = student.hidden.flatten(0, -2).index_select(0, index)
    wanted = (
        grad and student.weight.requires_grad,
        grad and student.bias is not None and student.bias.requires_grad,
    )
    head = _head(student, temperature, wanted)
    loss, kl, entropy = _FullDivergence.apply(
        hidden,
        student.weight,
        student.bias,
        head,
        _head(teacher, temperature),
        teacher.hidden.flatten(0, -2).index_select(0, index),
        token_weight.flatten().index_select(0, index).to(head.dtype),
        grad and hidden.requires_grad,
        divergence,
        beta,
    )

    def spread(rows: Tensor) -> Tensor:
        return rows.new_zeros(lead.numel()).index_copy(0, index, rows).view(lead)

    return FullDivergence(loss, spread(kl), spread(entropy))


@torch.no_grad()
def label_logprobs(side: HeadInput, labels: Tensor, temperature: float) -> Tensor:
    """(B, T) log-probs of `labels`  # (B, T) int64, without gradient and without the logits."""
    head, hidden, ids = _head(side, temperature), side.hidden.flatten(0, -2), labels.flatten()
    out = hidden.new_empty(len(ids), dtype=head.dtype)
    row_bytes = len(side.weight) * head.dtype.itemsize
    kind = hidden.device.type
    for part in _parts(len(ids), 2 * row_bytes, CHUNK_BYTES.get(kind, CHUNK_BYTES_DEVICE)):
        logits = out.new_empty(part.stop - part.start, side.weight.shape[0])
        head.multiply(hidden[part], logits)
        head.to_logits_(logits)
        picked = logits.gather(1, ids[part, None]).squeeze(1)
        out[part] = picked - logits.logsumexp(-1)
    return out.view(labels.shape)
