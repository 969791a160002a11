"""The loss from two logits tensors in plain torch, a few rows at a time; `loss_triton` is the same on the kernels."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lopd_fast.loss_checks import Rows
from lopd_fast.loss_rows import (
    LossOptions,
    RowRecord,
    SideRecord,
    concatenate,
    finish_gradient_,
    gradient_parts,
    rows_forward_,
    tail_softmax_,
)
from lopd_fast.loss_support import VocabShard

SCRATCH_BYTES = {"cpu": 8 << 20}  # one side of a chunk: on a CPU it should stay in cache over its few passes
SCRATCH_BYTES_DEVICE = 256 << 20


def logits_record(
    student: Tensor,
    teacher: Tensor | None,
    served: tuple[Tensor, Tensor] | None,
    rows: Rows,
    options: LossOptions,
) -> RowRecord:
    """The record of the rows that count, from logits (..., V) of any strides, which are not written to."""
    read = _LogitsReader(student, rows, options.temperature)
    read_teacher = None if teacher is None else _LogitsReader(teacher, rows, options.temperature)
    parts = []
    for part in _chunks(rows, options.shard):
        record = rows_forward_(
            read(part),
            None if read_teacher is None else read_teacher(part),
            None if served is None else (served[0][part], served[1][part]),
            None if rows.labels is None else rows.labels[part],
            options,
        )
        parts.append(record)
    sides = zip(*(part.sides for part in parts), strict=True)
    return RowRecord(
        concatenate([part.outputs for part in parts]), tuple(concatenate(list(side)) for side in sides)
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
    """kl_weight * d kl / d logits + privilege_weight * d privilege / d logits, in the shape and dtype of logits."""
    kl_weight = kl_weight / options.temperature
    if privilege_weight is not None:
        privilege_weight = privilege_weight / options.temperature
    shape = (logits.shape[:-1].numel(), logits.shape[-1])
    out = logits.new_empty(shape) if rows.index is None else logits.new_zeros(shape)
    read = _LogitsReader(logits, rows, options.temperature)
    for part in _chunks(rows, options.shard):
        record = SideRecord(*(x[part] for x in vars(side).values()))
        parts = gradient_parts(
            record,
            ids[part],
            kl_weight[part],
            None if privilege_weight is None else privilege_weight[part],
            None if rows.labels is None else rows.labels[part],
            options.shard,
        )
        chunk = finish_gradient_(tail_softmax_(read(part), record, ids[part], options.shard), parts)
        if rows.index is None:
            out[part] = chunk
        else:
            out.index_copy_(0, rows.index[part], chunk.to(out.dtype))
    return out.view(logits.shape)


class _LogitsReader:
    """Copies rows of logits (..., V), of any strides, into fresh (R, V) tensors over the temperature."""

    def __init__(self, logits: Tensor, rows: Rows, temperature: float) -> None:
        self.logits, self.index, self.temperature = logits, rows.index, temperature
        self.dtype, self.lead = rows.weight.dtype, logits.shape[:-1]
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


def _chunks(rows: Rows, shard: VocabShard) -> Iterator[slice]:
    """Slices of the rows that count; one empty slice if none do, so that every output gets its shape.

    The widest shard sets their size: every process must cut the same chunks.
    """
    budget = SCRATCH_BYTES.get(rows.weight.device.type, SCRATCH_BYTES_DEVICE)
    step = max(1, budget // (max(shard.widths) * rows.weight.itemsize))
    for start in range(0, max(rows.count, 1), step):
        yield slice(start, min(start + step, rows.count))
