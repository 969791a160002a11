"""The loss on one chunk of rows in plain torch: statistics, the record that a backward needs, and the gradient.

Per row and side, with support S, tail = every id outside S, z the logits divided by the temperature:

    softmax(z)_j        = e^{log_support_j}                        j in S
                        = e^{log_tail} e^{z_j - tail_lse}          j outside, tail_lse = logsumexp of those z
    d kl / dz_j         = kl_support_j                             j in S
                        = kl_tail e^{z_j - tail_lse}               j outside
    d privilege / du_j  = [j = a] - softmax(u)_j                   teacher only

so the gradient of a row of V logits is a scaled copy of the tail's own softmax plus k explicit values. Scaling the
tail's softmax, and not the whole one, keeps q_tail / p_tail (which may be e^200) out of the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from lopd_fast.loss_divergence import NEG_INF, bucket_divergence
from lopd_fast.loss_support import VocabShard

CACHE_BYTES = (
    8 << 20
)  # of logits that a CPU passes over at a time; smaller would wait for its threads too often


@dataclass(frozen=True)
class LossOptions:
    """What the divergence is; see `lopd_fast.topk_tail_kl`."""

    k: int
    support: str
    divergence: str
    beta: float
    tail: str
    temperature: float
    shard: VocabShard
    triton: bool = False  # computed by the kernels, through `triton_rows`


@dataclass(frozen=True)
class SideLogprobs:
    """Log-probs of one side, before the other side is known."""

    log_support: Tensor  # (R, k) log-probs of the support
    log_tail: Tensor  # (R,) log-prob of everything else
    tail_lse: Tensor  # (R,) logsumexp of the logits outside the support; 0 where there are none
    log_label: Tensor | None  # (R,) None without labels


@dataclass(frozen=True)
class SideRecord:
    """One side of a chunk, enough to write its gradient in one pass over its logits."""

    log_support: Tensor  # (R, k) log-probs of the support
    log_tail: Tensor  # (R,) log-prob of everything else
    tail_lse: Tensor  # (R,) logsumexp of the logits outside the support; 0 where there are none
    kl_support: Tensor  # (R, k) d kl / d logit on the support
    kl_tail: Tensor  # (R,) the same outside, summed over the tail


@dataclass(frozen=True)
class RowOutputs:
    """What callers see of each row."""

    kl: Tensor  # (R,)
    privilege: Tensor | None  # (R,) None without labels
    ids: Tensor  # (R, k) global ids of the support, -1 where it is shorter
    student_mass: Tensor  # (R,)
    teacher_mass: Tensor  # (R,)
    student_logprob: Tensor | None  # (R,) of the label
    teacher_logprob: Tensor | None  # (R,)

    @classmethod
    def of(
        cls,
        kl: Tensor,
        ids: Tensor,
        student: SideLogprobs,
        teacher: SideLogprobs,
        student_mass: Tensor,
        teacher_mass: Tensor,
    ) -> RowOutputs:
        privilege = None
        if student.log_label is not None and teacher.log_label is not None:
            privilege = teacher.log_label - student.log_label
        return cls(kl, privilege, ids, student_mass, teacher_mass, student.log_label, teacher.log_label)

    def tensors(self) -> tuple[Tensor | None, ...]:
        return tuple(vars(self).values())


@dataclass(frozen=True)
class RowRecord:
    """What the forward leaves of a chunk: its outputs, and a record per side from which to write the gradient."""

    outputs: RowOutputs
    sides: tuple[SideRecord, ...]  # student, teacher; the student alone if the teacher is served


Rowwise = TypeVar("Rowwise", RowOutputs, SideRecord)


def concatenate(parts: list[Rowwise]) -> Rowwise:
    """The rows of several chunks as one."""
    first = parts[0]
    if len(parts) == 1:
        return first
    joined: dict[str, Any] = {}
    for name, x in vars(first).items():
        joined[name] = None if x is None else torch.cat([getattr(part, name) for part in parts])
    return type(first)(**joined)


def mask_support_(logits: Tensor, columns: Tensor, here: Tensor) -> Tensor:
    """Sets the support's logits to -inf; entries that are not `here` leave the column they point at alone."""
    return logits.scatter_add_(
        1, columns, torch.zeros_like(columns, dtype=logits.dtype).masked_fill_(here, NEG_INF)
    )


def tail_exponentials_(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Replaces each row by e^{z - its maximum}; returns that maximum (-inf if all are) and the sum, both (R,).

    On a CPU some rows at a time, so that they stay in cache over the four passes.
    """
    peak, total = logits.new_empty(2, len(logits))
    step = max(1, CACHE_BYTES // (logits.shape[1] * logits.itemsize) if logits.is_cpu else len(logits))
    for start in range(0, len(logits), step):
        rows = logits[start : start + step]
        torch.amax(rows, -1, out=peak[start : start + step])
        shift = peak[start : start + step].masked_fill(peak[start : start + step] == NEG_INF, 0.0)
        torch.sum(rows.sub_(shift[:, None]).exp_(), -1, out=total[start : start + step])
    return peak, total


def side_logprobs(
    support: Tensor, label: Tensor | None, shift: Tensor, total: Tensor, shard: VocabShard
) -> SideLogprobs:
    """Log-probs of one side from what this shard has of its logits.

    support       # (R, k) logits of the support, -inf where they are not here
    label         # (R,) logits of the labels, likewise
    shift, total  # (R,) the sum of e^{z - shift} over the tail; a shift of -inf means that all of it is -inf
    """
    picked = [support, *([] if label is None else [label[:, None]]), shift[:, None]]
    values = shard.max(torch.cat(picked, dim=1))
    support, peak = values[:, : support.shape[1]], values[:, -1]
    if shard.group is not None:
        total = shard.sum(torch.where(total > 0, total * (shift - peak).exp(), 0.0))

    # Everything relative to the row's maximum: differences of logits are exact, a large lse would not be.
    top = torch.cat([support, peak[:, None]], dim=1).amax(-1)
    weights = torch.cat([(support - top[:, None]).exp(), ((peak - top).exp() * total)[:, None]], dim=1)
    largest = weights.argmax(-1, keepdim=True)
    log_sum = torch.log1p(weights.scatter_add(1, largest, -torch.ones_like(weights[:, :1])).sum(-1))
    tail = peak + total.log()
    return SideLogprobs(
        log_support=(support - top[:, None]) - log_sum[:, None],
        log_tail=((peak - top) + total.log()) - log_sum,
        tail_lse=tail.masked_fill(tail == NEG_INF, 0.0),
        log_label=None if label is None else (values[:, -2] - top) - log_sum,
    )


def _side_(logits: Tensor, ids: Tensor, labels: Tensor | None, shard: VocabShard) -> SideLogprobs:
    """Log-probs of one side from its logits  # (R, V), which are overwritten."""
    columns, here = shard.columns(ids)
    support = logits.gather(1, columns).masked_fill_(~here, NEG_INF)
    label = None
    if labels is not None:
        label_columns, label_here = shard.columns(labels[:, None])
        label = logits.gather(1, label_columns).masked_fill_(~label_here, NEG_INF)[:, 0]
    mask_support_(logits, columns, here)
    return side_logprobs(support, label, *tail_exponentials_(logits), shard)


def served_side(ids: Tensor, logprobs: Tensor, labels: Tensor | None, total_ids: int) -> SideLogprobs:
    """The side of a teacher of whom only a list of log-probs is known.

    Its tail is what the list leaves, log1p(-sum e^t), summed in fp64. A list that rounding brings to 1 or more while
    ids remain outside it says only that the tail is below the resolution of fp32, and is read as that resolution.
    """
    exact = logprobs.double().masked_fill(ids < 0, NEG_INF)
    rest = 1.0 - exact.exp().sum(-1)
    rest = torch.where(rest > 0, rest, torch.finfo(torch.float32).eps)
    rest = rest.masked_fill((ids >= 0).sum(-1) == total_ids, 0.0)
    log_label = None
    if labels is not None:
        listed = ids == labels[:, None]
        log_label = logprobs.masked_fill(~listed, 0.0).sum(-1)  # of one entry; the list may be empty
        log_label = log_label.masked_fill(~listed.any(-1), float("nan"))
    log_tail = rest.log().to(logprobs.dtype)
    return SideLogprobs(exact.to(logprobs.dtype), log_tail, torch.zeros_like(log_tail), log_label)


def _mass(side: SideLogprobs) -> Tensor:
    """Probability of the support: from the tail where that is the smaller, so that rounding never passes 1."""
    support = side.log_support.exp().sum(-1)
    return torch.where(side.log_tail < -0.7, -torch.expm1(side.log_tail), support)


def _renormalised(log_support: Tensor) -> Tensor:
    norm = log_support.logsumexp(-1, keepdim=True)
    return log_support - norm.masked_fill(norm == NEG_INF, 0.0)


def _divergence(
    student: SideLogprobs, teacher: SideLogprobs, options: LossOptions
) -> tuple[Tensor, SideRecord, SideRecord]:
    """D per row and the records of both sides."""
    s, t = student.log_support, teacher.log_support
    if options.tail == "renormalize":
        s, t = _renormalised(s), _renormalised(t)
    elif options.tail == "bucket":
        s = torch.cat([s, student.log_tail[:, None]], dim=1)
        t = torch.cat([t, teacher.log_tail[:, None]], dim=1)
    d = bucket_divergence(s, t, options.divergence, options.beta, complete=options.tail != "drop")

    def record(side: SideLogprobs, grad: Tensor, rest: Tensor) -> SideRecord:
        k = side.log_support.shape[1]
        # The tail's gradient is its own bucket's, or through the normaliser alone.
        tail = grad[:, k] if options.tail == "bucket" else side.log_tail.exp() * rest
        return SideRecord(side.log_support, side.log_tail, side.tail_lse, grad[:, :k], tail)

    return d.value, record(student, d.student, d.student_rest), record(teacher, d.teacher, d.teacher_rest)


def row_record(
    ids: Tensor, student: SideLogprobs, teacher: SideLogprobs, served: bool, options: LossOptions
) -> RowRecord:
    """The record of a chunk from the log-probs of its sides."""
    kl, s_record, t_record = _divergence(student, teacher, options)
    outputs = RowOutputs.of(kl, ids, student, teacher, _mass(student), _mass(teacher))
    return RowRecord(outputs, (s_record,) if served else (s_record, t_record))


def rows_forward_(
    student: Tensor,
    teacher: Tensor | None,
    served: tuple[Tensor, Tensor] | None,
    labels: Tensor | None,
    options: LossOptions,
) -> RowRecord:
    """The record of a chunk.

    student, teacher  # (R, V) fp32 or fp64 logits over the temperature, owned by the caller and overwritten
    served            # ids (R, k'), logprobs (R, k') in place of teacher
    labels            # (R,) global ids
    """
    shard = options.shard
    if served is not None:
        ids, t_side = served[0], served_side(*served, labels, shard.total)
    else:
        assert teacher is not None
        ids = shard.topk_ids(teacher if options.support == "teacher" else student, options.k)
        t_side = _side_(teacher, ids, labels, shard)
    return row_record(ids, _side_(student, ids, labels, shard), t_side, served is not None, options)


def tail_softmax_(logits: Tensor, side: SideRecord, ids: Tensor, shard: VocabShard) -> Tensor:
    """Turns logits (R, V) over the temperature into the tail's softmax, 0 on the support."""
    mask_support_(logits, *shard.columns(ids))
    return logits.sub_(side.tail_lse[:, None]).exp_()


def gradient_parts(
    side: SideRecord,
    ids: Tensor,
    kl_weight: Tensor,
    privilege_weight: Tensor | None,
    labels: Tensor | None,
    shard: VocabShard,
) -> tuple[Tensor, Tensor, Tensor]:
    """kl_weight * d kl / dz + privilege_weight * d privilege / dz as a factor (R,) on the tail's softmax, and values
    (R, m) to add at columns (R, m) of this shard, where the tail's softmax is 0 or the label."""
    tail = kl_weight * side.kl_tail
    values = kl_weight[:, None] * side.kl_support
    if privilege_weight is not None:
        assert labels is not None
        tail = tail - privilege_weight * side.log_tail.exp()
        values = values - privilege_weight[:, None] * side.log_support.exp()
        values = torch.cat([values, privilege_weight[:, None]], dim=1)
        ids = torch.cat([ids, labels[:, None]], dim=1)
    columns, here = shard.columns(ids)
    return tail, columns, values.masked_fill(~here, 0.0)


def finish_gradient_(tail_softmax: Tensor, parts: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Turns the tail's softmax  # (R, V), 0 on the support, into the gradient that `parts` describes, in place."""
    tail, columns, values = parts
    return tail_softmax.mul_(tail[:, None]).scatter_add_(1, columns, values)
