"""From two logits tensors to the divergence per row, differentiable on both sides, a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lopd_fast.loss_checks import Rows
from lopd_fast.loss_rows import (
    LossOptions,
    SideRecord,
    concatenate,
    finish_gradient_,
    rows_forward_,
    tail_softmax_,
)

SCRATCH_BYTES = {"cpu": 8 << 20}  # one side of a chunk: on a CPU it should stay in cache over its few passes
SCRATCH_BYTES_DEVICE = 256 << 20


def _chunks(count: int, width: int, like: Tensor) -> Iterator[slice]:
    """Slices of the rows that count; one empty slice if none do, so that every output gets its shape."""
    budget = SCRATCH_BYTES.get(like.device.type, SCRATCH_BYTES_DEVICE)
    step = max(1, budget // (width * 8 if like.dtype == torch.float64 else width * 4))
    for start in range(0, max(count, 1), step):
        yield slice(start, min(start + step, count))


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """fp64 stays fp64, everything else is computed in fp32."""
    return (
        torch.float64 if any(x is not None and x.dtype == torch.float64 for x in tensors) else torch.float32
    )


class _LogitsReader:
    """Copies rows of logits (..., V), of any strides, into fresh (R, V) tensors over the temperature."""

    def __init__(self, logits: Tensor, rows: Rows, dtype: torch.dtype, temperature: float) -> None:
        self.logits, self.index, self.dtype, self.temperature = logits, rows.index, dtype, temperature
        self.lead = logits.shape[:-1]
        try:
            self.flat = logits.view(self.lead.numel(), logits.shape[-1])
        except RuntimeError:  # leading dimensions that do not fold: read rows by their coordinates
            self.flat = None

    def __call__(self, part: slice) -> Tensor:
        if self.flat is None:
            if self.index is not None:
                rows = self.index[part]
            else:
                rows = torch.arange(part.start, part.stop, device=self.logits.device)
            chunk = self.logits[torch.unravel_index(rows, self.lead)].to(self.dtype)
        elif self.index is not None:
            chunk = self.flat.index_select(0, self.index[part]).to(self.dtype)
        else:
            chunk = self.flat[part].to(self.dtype, copy=True, memory_format=torch.contiguous_format)
        return chunk if self.temperature == 1 else chunk.div_(self.temperature)


class LogitsLoss(torch.autograd.Function):
    """(student logits, teacher logits or None) -> kl (R,), privilege (R,) and undifferentiated outputs.

    Keeps the inputs and a record of O(R k) numbers; backward reads each logits tensor once more and writes its
    gradient once.
    """

    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor | None, served: Any, rows: Rows, options: LossOptions
    ):
        dtype = compute_dtype(student, teacher)
        with torch.autocast(student.device.type, enabled=False):
            read_student = _LogitsReader(student, rows, dtype, options.temperature)
            read_teacher = (
                None if teacher is None else _LogitsReader(teacher, rows, dtype, options.temperature)
            )
            parts = []
            for part in _chunks(
                rows.count, student.shape[-1], torch.empty(0, dtype=dtype, device=student.device)
            ):
                record, _, _ = rows_forward_(
                    read_student(part),
                    None if read_teacher is None else read_teacher(part),
                    None if served is None else (served[0][part], served[1][part]),
                    None if rows.labels is None else rows.labels[part],
                    options,
                )
                parts.append(record)
        outputs = concatenate([part.outputs for part in parts])
        sides = [concatenate([part.student for part in parts])]
        if teacher is not None:
            sides.append(concatenate([part.teacher for part in parts if part.teacher is not None]))
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

        def gradient(logits: Tensor, side: SideRecord, grad_privilege: Tensor | None) -> Tensor:
            dtype = side.kl_tail.dtype
            kl_weight = side.kl_tail.new_zeros(rows.count) if grad_kl is None else grad_kl
            kl_weight = kl_weight.to(dtype) / options.temperature
            if grad_privilege is not None:
                grad_privilege = grad_privilege.to(dtype) / options.temperature
            shape = (logits.shape[:-1].numel(), logits.shape[-1])
            new = logits.new_empty if rows.index is None else logits.new_zeros
            out = new(shape)
            read = _LogitsReader(logits, rows, dtype, options.temperature)
            for part in _chunks(rows.count, shape[1], side.kl_tail):
                record = SideRecord(*(x[part] for x in vars(side).values()))
                chunk = finish_gradient_(
                    tail_softmax_(read(part), record, ids[part], options.shard),
                    None,
                    record,
                    ids[part],
                    kl_weight[part],
                    None if grad_privilege is None else grad_privilege[part],
                    None if rows.labels is None else rows.labels[part],
                    options.shard,
                )
                if rows.index is None:
                    out[part] = chunk
                else:
                    out.index_copy_(0, rows.index[part], chunk.to(out.dtype))
            return out.view(logits.shape)

        grad_student = grad_teacher = None
        if ctx.needs_input_grad[0]:
            grad_student = gradient(student, SideRecord(*saved[:fields]), None)
        if teacher is not None and ctx.needs_input_grad[1]:
            grad_teacher = gradient(teacher, SideRecord(*saved[fields:]), grad_privilege)
        return grad_student, grad_teacher, None, None, None
