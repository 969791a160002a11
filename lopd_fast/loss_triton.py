"""The loss on Triton kernels: what `loss_torch` and `fused_tiles` do, under the same names."""

from __future__ import annotations

import torch
from torch import Tensor

from lopd_fast.fused_chunk import ChunkInput
from lopd_fast.kernels._common import Logits
from lopd_fast.kernels.block_stats import block_stats
from lopd_fast.kernels.bucket_divergence import bucket_divergence
from lopd_fast.kernels.logits_grad import logits_grad
from lopd_fast.kernels.select_support import select_support
from lopd_fast.kernels.support_logprobs import support_logprobs
from lopd_fast.loss_checks import Rows
from lopd_fast.loss_rows import (
    LossOptions,
    RowOutputs,
    RowRecord,
    SideLogprobs,
    SideRecord,
    served_side,
)


def logits_record(
    student: Tensor,
    teacher: Tensor | None,
    served: tuple[Tensor, Tensor] | None,
    rows: Rows,
    options: LossOptions,
) -> RowRecord:
    """The record of the rows that count; logits are read where they lie, in their own dtype, and never copied.

    Each logits tensor is read once, and some 5 % of it again.
    """
    gain = 1 / options.temperature
    return _record(
        Logits(student, rows.index, gain=gain),
        None if teacher is None else Logits(teacher, rows.index, gain=gain),
        served,
        rows.labels,
        options,
    )


def logits_gradient(
    logits: Tensor,
    side: SideRecord,
    ids: Tensor,
    kl_weight: Tensor,
    privilege_weight: Tensor | None,
    rows: Rows,
    options: LossOptions,
) -> Tensor:
    """kl_weight * d kl / d logits + privilege_weight * d privilege / d logits; logits are read once more."""
    count = logits.shape[:-1].numel()
    position = None
    if rows.index is not None:
        position = rows.index.new_full((count,), -1)
        position[rows.index] = torch.arange(rows.count, device=logits.device)
    source = Logits(logits, rows.index, gain=1 / options.temperature)
    out = logits.new_empty(count, logits.shape[-1])
    logits_grad(source, out, position, ids, _fields(side), kl_weight, privilege_weight, rows.labels)
    return out.view(logits.shape)


class Chunk:
    """Some rows of the fused loss, from hidden states to their record and the gradient of their logits.

    Bias, scale, soft-cap and temperature are applied by the kernels as they read.
    """

    def __init__(self, given: ChunkInput) -> None:
        """Both sides are held, and no tile is needed."""
        assert not any(given.wanted)
        # One product a side, although a tied head could share one: a product's rounding may depend on where in it a
        # row stands, and equal hidden states are to give equal logits.
        for head, x, out in zip(given.heads, given.hidden, given.logits, strict=True):
            head.multiply(x, out)
        self.labels = given.labels
        self.logits = [
            Logits(x, bias=head.bias, gain=head.gain, cap_gain=None if head.cap is None else head.cap_gain)
            for x, head in zip(given.logits, given.heads, strict=True)
        ]
        teacher = self.logits[1] if len(given.logits) == 2 else None
        self.record = _record(self.logits[0], teacher, given.served, given.labels, given.options)

    def gradient(self, i: int, kl_weight: Tensor, privilege_weight: Tensor | None, out: Tensor) -> None:
        """Writes kl_weight * d kl / d (h W^T + b) + privilege_weight * d privilege / d (h W^T + b) of side i to out.

        out  # (R, V) of any float dtype; may be the logits themselves
        """
        side, ids = self.record.sides[i], self.record.outputs.ids
        logits_grad(self.logits[i], out, None, ids, _fields(side), kl_weight, privilege_weight, self.labels)


def _record(
    student: Logits,
    teacher: Logits | None,
    served: tuple[Tensor, Tensor] | None,
    labels: Tensor | None,
    options: LossOptions,
) -> RowRecord:
    student_stats = block_stats(student)
    if served is not None:
        ids = served[0]
        t_side = served_side(*served, labels, options.shard.total)
    else:
        assert teacher is not None
        teacher_stats = block_stats(teacher)
        if options.support == "teacher":
            ids = select_support(teacher, teacher_stats[0], options.k)
        else:
            ids = select_support(student, student_stats[0], options.k)
        t_side = SideLogprobs(*support_logprobs(teacher, teacher_stats, ids, labels))
    s_side = SideLogprobs(*support_logprobs(student, student_stats, ids, labels))
    kl, s_grads, t_grads, masses = bucket_divergence(
        (s_side.log_support, s_side.log_tail),
        (t_side.log_support, t_side.log_tail),
        divergence=options.divergence,
        beta=options.beta,
        tail=options.tail,
    )
    sides = tuple(
        SideRecord(side.log_support, side.log_tail, side.tail_lse, *grads)
        for side, grads in ((s_side, s_grads), (t_side, t_grads))
    )
    outputs = RowOutputs.of(kl, ids, s_side, t_side, *masses)
    return RowRecord(outputs, sides if served is None else sides[:1])


def _fields(side: SideRecord) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return side.log_support, side.log_tail, side.tail_lse, side.kl_support, side.kl_tail
