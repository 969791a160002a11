"""The loss on Triton kernels: the record of a chunk, its gradient in place, and the function of two logits tensors.

What `loss_rows` and `logits_loss` do in torch, from the same arguments to the same record.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lopd_fast.kernels._common import Logits
from lopd_fast.kernels.block_stats import block_stats
from lopd_fast.kernels.logits_grad import logits_grad
from lopd_fast.kernels.select_support import select_support
from lopd_fast.kernels.topk_tail import rows_forward
from lopd_fast.loss_checks import Rows
from lopd_fast.loss_rows import LossOptions, RowOutputs, RowRecord, SideRecord, _served_side
from lopd_fast.loss_support import VocabShard


def record(
    student: Logits,
    teacher: Logits | None,
    served: tuple[Tensor, Tensor] | None,
    labels: Tensor | None,
    options: LossOptions,
) -> RowRecord:
    """The record of some rows; logits are read, not changed."""
    student_stats = block_stats(student)
    teacher_stats = None if teacher is None else block_stats(teacher)
    listed = listed_tail = listed_label = None
    if served is not None:
        side = _served_side(*served, labels, options.shard.total)
        ids, listed = served[0], (side.log_support, side.log_tail)
        listed_tail, listed_label = side.tail_lse, side.label_logprob
    else:
        assert teacher is not None and teacher_stats is not None
        of_teacher = options.support == "teacher"
        source, stats = (teacher, teacher_stats) if of_teacher else (student, student_stats)
        ids = select_support(source, stats[0], options.k)
    vectors, scalars = rows_forward(
        student,
        student_stats,
        teacher,
        teacher_stats,
        listed,
        ids,
        labels,
        divergence=options.divergence,
        beta=options.beta,
        tail=options.tail,
    )
    if listed_tail is not None:
        scalars["t_tail_lse"] = listed_tail
    student_label = teacher_label = privilege = None
    if labels is not None:
        student_label = scalars["s_label"]
        teacher_label = scalars["t_label"] if listed_label is None else listed_label
        privilege = teacher_label - student_label
    outputs = RowOutputs(
        kl=scalars["kl"],
        privilege=privilege,
        ids=ids,
        student_mass=scalars["s_mass"],
        teacher_mass=scalars["t_mass"],
        student_logprob=student_label,
        teacher_logprob=teacher_label,
    )
    sides = [
        SideRecord(
            log_support=vectors[f"{name}_log_support"],
            log_tail=scalars[f"{name}_log_tail"],
            tail_lse=scalars[f"{name}_tail_lse"],
            kl_support=vectors[f"{name}_kl_support"],
            kl_tail=scalars[f"{name}_kl_tail"],
        )
        for name in ("s", "t")
    ]
    return RowRecord(outputs, sides[0], None if served is not None else sides[1])


def rows_forward_(
    student: Tensor,
    teacher: Tensor | None,
    served: tuple[Tensor, Tensor] | None,
    labels: Tensor | None,
    options: LossOptions,
) -> tuple[RowRecord, None, None]:
    """`loss_rows.rows_forward_`, but the logits (R, V) stay as they are."""
    teacher_logits = None if teacher is None else Logits(teacher)
    return record(Logits(student), teacher_logits, served, labels, options), None, None


def finish_gradient_(
    logits: Tensor,
    shift: None,
    side: SideRecord,
    ids: Tensor,
    kl_weight: Tensor,
    privilege_weight: Tensor | None,
    labels: Tensor | None,
    shard: VocabShard,
) -> Tensor:
    """`loss_rows.finish_gradient_` from the logits themselves (R, V), which become the gradient."""
    return gradient(Logits(logits), logits, None, side, ids, kl_weight, privilege_weight, labels)


def gradient(
    logits: Logits,
    out: Tensor,
    position: Tensor | None,
    side: SideRecord,
    ids: Tensor,
    kl_weight: Tensor,
    privilege_weight: Tensor | None,
    labels: Tensor | None,
) -> Tensor:
    """Writes kl_weight * d kl / dx + privilege_weight * d privilege / dx to out  # (N, V); may be the logits."""
    fields = (side.log_support, side.log_tail, side.tail_lse, side.kl_support, side.kl_tail)
    return logits_grad(logits, out, position, ids, fields, kl_weight, privilege_weight, labels)


class TritonLogitsLoss(torch.autograd.Function):
    """`LogitsLoss` on the kernels: logits are read where they lie, in their own dtype, and never copied.

    Forward reads each logits tensor once and some 5 % of it again; backward reads it once and writes its gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor | None, served: Any, rows: Rows, options: LossOptions
    ):
        gain = 1 / options.temperature
        result = record(
            Logits(student, rows.index, gain=gain),
            None if teacher is None else Logits(teacher, rows.index, gain=gain),
            served,
            rows.labels,
            options,
        )
        outputs = result.outputs
        sides = [side for side in (result.student, result.teacher) if side is not None]
        ctx.save_for_backward(
            student, teacher, outputs.ids, *(x for side in sides for x in vars(side).values())
        )
        ctx.rows, ctx.options = rows, options
        ctx.set_materialize_grads(False)
        kl, privilege, *fixed = outputs.tensors()
        ctx.mark_non_differentiable(*(x for x in fixed if x is not None))
        return kl, privilege, *fixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_kl: Tensor | None, grad_privilege: Tensor | None, *_: Any):
        student, teacher, ids, *saved = ctx.saved_tensors
        rows, options = ctx.rows, ctx.options
        fields = len(SideRecord.__dataclass_fields__)

        def of(logits: Tensor, side: SideRecord, margin: Tensor | None) -> Tensor:
            count = logits.shape[:-1].numel()
            position = None
            if rows.index is not None:
                position = rows.index.new_full((count,), -1)
                position[rows.index] = torch.arange(rows.count, device=logits.device)
            weight = side.kl_tail.new_zeros(rows.count) if grad_kl is None else grad_kl
            read = Logits(logits, rows.index, gain=1 / options.temperature)
            out = logits.new_empty(count, logits.shape[-1])
            return gradient(read, out, position, side, ids, weight, margin, rows.labels).view(logits.shape)

        grad_student = grad_teacher = None
        if ctx.needs_input_grad[0]:
            grad_student = of(student, SideRecord(*saved[:fields]), None)
        if teacher is not None and ctx.needs_input_grad[1]:
            grad_teacher = of(teacher, SideRecord(*saved[fields:]), grad_privilege)
        return grad_student, grad_teacher, None, None, None
