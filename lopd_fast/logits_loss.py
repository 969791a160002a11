"""From two logits tensors to the divergence per row, differentiable on both sides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lopd_fast.loss_backend import rows_of
from lopd_fast.loss_checks import Rows
from lopd_fast.loss_rows import LossOptions, SideRecord


class LogitsLoss(torch.autograd.Function):
    """(student logits, teacher logits or None) -> kl (R,), privilege (R,) and undifferentiated outputs.

    Keeps the inputs and a record of O(R k) numbers; backward reads each logits tensor once more and writes its
    gradient once.
    """

    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor | None, served: Any, rows: Rows, options: LossOptions
    ):
        with torch.autocast(student.device.type, enabled=False):
            record = rows_of(options).logits_record(student, teacher, served, rows, options)
        outputs = record.outputs
        saved = [x for side in record.sides for x in vars(side).values()]
        ctx.save_for_backward(student, teacher, outputs.ids, *saved)
        ctx.rows, ctx.options = rows, options
        ctx.set_materialize_grads(False)
        kl, privilege, *fixed = outputs.tensors()
        ctx.mark_non_differentiable(*(x for x in fixed if x is not None))
        return kl, privilege, *fixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_kl: Tensor | None, grad_privilege: Tensor | None, *_: Any):
        student, teacher, ids, *saved = ctx.saved_tensors
        fields = len(SideRecord.__dataclass_fields__)

        def gradient(logits: Tensor, side: SideRecord, margin: Tensor | None) -> Tensor:
            weight = side.kl_tail.new_zeros(len(side.kl_tail)) if grad_kl is None else grad_kl
            return rows_of(ctx.options).logits_gradient(
                logits, side, ids, weight, margin, ctx.rows, ctx.options
            )

        grad_student = grad_teacher = None
        if ctx.needs_input_grad[0]:
            grad_student = gradient(student, SideRecord(*saved[:fields]), None)
        if teacher is not None and ctx.needs_input_grad[1]:
            grad_teacher = gradient(teacher, SideRecord(*saved[fields:]), grad_privilege)
        return grad_student, grad_teacher, None, None, None
