"""Argument checks of the loss: what cannot work is refused in one sentence that names the sizes."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lopd_fast.loss_rows import LossOptions
from lopd_fast.loss_support import VocabShard

SUPPORTS = ("teacher", "student")
DIVERGENCES = ("reverse_kl", "forward_kl", "jsd")
TAILS = ("bucket", "renormalize", "drop")
BACKENDS = ("auto", "torch", "triton")
MISSING_LOGPROB = -9000.0  # at or below: some servers send -9999 for null, which bf16 rounds to -9984


@dataclass(frozen=True)
class Rows:
    """The rows that count, over the flattened leading dimensions; R of all N."""

    index: Tensor | None  # (R,) int64, None: all of them
    count: int  # R
    labels: Tensor | None  # (R,) int64
    weight: Tensor  # (R,) token weight / Z
    privilege_weight: Tensor | None  # (R,)

    def pick(self, x: Tensor) -> Tensor:
        """(N, ...) -> (R, ...)."""
        return x if self.index is None else x.index_select(0, self.index)

    def pick_part(self, x: Tensor, part: slice) -> Tensor:
        """(N, ...) -> the rows `part` of those that count; a view if all count."""
        return x[part] if self.index is None else x.index_select(0, self.index[part])

    def spread(self, x: Tensor, lead: torch.Size, fill: float = 0.0) -> Tensor:
        """(R, ...) -> (*lead, ...), `fill` in the rows that do not count. Differentiable."""
        if self.index is not None:
            full = x.new_full((lead.numel(), *x.shape[1:]), fill)
            x = full.index_copy(0, self.index, x)
        return x.reshape((*lead, *x.shape[1:]))


def one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, allowed))}")


def float_tensor(name: str, x: Any) -> None:
    """A local floating-point tensor with at least one dimension."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(x).__name__}")
    dtensor = sys.modules.get("torch.distributed.tensor")
    if dtensor is not None and isinstance(x, dtensor.DTensor):
        raise TypeError(
            f"{name} is a DTensor of shape {tuple(x.shape)}: under FSDP2 call unshard() on the module that holds it, "
            "under tensor parallelism pass its to_local() shard along the vocabulary together with process_group"
        )
    if not x.is_floating_point():
        raise TypeError(f"{name} must be floating point, not {x.dtype}")
    if x.dim() == 0:
        raise ValueError(f"{name} must have a last dimension, but it is a scalar")


def teacher_form(tensor_name: str, tensor: Any, teacher_topk: Any, support: str) -> None:
    if (tensor is None) == (teacher_topk is None):
        given = "neither was" if tensor is None else "both were"
        raise ValueError(f"pass either {tensor_name} or teacher_topk; {given} given")
    if teacher_topk is not None and support == "student":
        raise ValueError(
            "support='student' needs the teacher's log-probs at the student's ids, which teacher_topk does not hold: "
            f"pass {tensor_name}, or support='teacher'"
        )


def options(
    shard: VocabShard, *, k: int, support: str, divergence: str, beta: float, tail: str, temperature: float
) -> LossOptions:
    one_of("support", support, SUPPORTS)
    one_of("divergence", divergence, DIVERGENCES)
    one_of("tail", tail, TAILS)
    if isinstance(k, bool) or not isinstance(k, int):
        raise TypeError(f"k={k} must be an int, not {type(k).__name__}")
    if divergence == "jsd" and not 0 < beta < 1:
        raise ValueError(f"beta={beta} must lie strictly between 0 and 1; at an end jsd is 0 for every input")
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature={temperature} must be positive and finite")
    return LossOptions(k, support, divergence, float(beta), tail, float(temperature), shard)


def support_size(k: int, vocabulary: int) -> None:
    if not 1 <= k <= vocabulary:
        raise ValueError(f"k={k} must lie between 1 and the vocabulary size {vocabulary}")


def backend(name: str) -> None:
    one_of("backend", name, BACKENDS)


def _per_row(name: str, x: Any, lead: torch.Size, device: torch.device) -> Tensor:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(x).__name__}")
    if x.shape != lead:
        raise ValueError(f"{name} has shape {tuple(x.shape)}, but there is one row for each of {tuple(lead)}")
    return x.detach().reshape(-1).to(device)


def _normaliser(num_items: Any, weight: Tensor) -> Tensor | float:
    """Z of the loss, as a number or a 0-d tensor on the device of `weight` (no copy to the host)."""
    if num_items is None:
        return weight.sum()
    if isinstance(num_items, Tensor):
        if num_items.numel() != 1:
            raise ValueError(f"num_items must hold one number, but has shape {tuple(num_items.shape)}")
        return num_items.detach().reshape(()).to(weight.device, weight.dtype)
    if num_items < 0 or (num_items == 0 and weight.numel()):
        raise ValueError(f"num_items={num_items} must be positive, for {weight.numel()} rows count")
    return float(num_items)


def rows(
    lead: torch.Size,
    *,
    labels: Any,
    token_weight: Any,
    privilege_weight: Any,
    num_items: Any,
    ignore_index: int,
    vocabulary: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Rows:
    """Drops the rows that do not count (label ignore_index, or weight 0) and normalises the weights of the rest."""
    keep = None
    if labels is not None:
        labels = _per_row("labels", labels, lead, device)
        if labels.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"labels must be int64, not {labels.dtype}")
        labels = labels.long()
        keep = labels != ignore_index
    elif privilege_weight is not None:
        raise ValueError("privilege_weight needs labels: the margin is about the sampled token")
    if token_weight is not None:
        token_weight = _per_row("token_weight", token_weight, lead, device).to(dtype)
        keep = token_weight != 0 if keep is None else keep & (token_weight != 0)
    if privilege_weight is not None:
        privilege_weight = _per_row("privilege_weight", privilege_weight, lead, device).to(dtype)

    index = None
    if keep is not None:
        index = keep.nonzero().squeeze(1)
        if len(index) == lead.numel():
            index = None
    count = lead.numel() if index is None else len(index)
    picked = Rows(index, count, None, torch.empty(0), None)
    labels, token_weight, privilege_weight = (
        None if x is None else picked.pick(x) for x in (labels, token_weight, privilege_weight)
    )
    if labels is not None and count:
        low, high = torch.stack(labels.aminmax()).tolist()
        if low < 0 or high >= vocabulary:
            wrong = low if low < 0 else high
            raise ValueError(f"labels hold id {wrong}, outside the vocabulary of {vocabulary} ids")
    weight = torch.ones(count, dtype=dtype, device=device) if token_weight is None else token_weight
    weight = weight / _normaliser(num_items, weight) if count else weight
    return Rows(index, count, labels, weight, privilege_weight)


def served_teacher(
    teacher_topk: Any, lead: torch.Size, picked: Rows, vocabulary: int, dtype: torch.dtype, device
):
    """ids (R, k') and logprobs (R, k') of the rows that count, padding as id -1."""
    if not (isinstance(teacher_topk, (tuple, list)) and len(teacher_topk) == 2):
        raise TypeError("teacher_topk must be a pair (ids, logprobs)")
    ids, logprobs = teacher_topk
    if not isinstance(ids, Tensor) or ids.is_floating_point():
        raise TypeError("teacher_topk ids must be an integer tensor")
    float_tensor("teacher_topk logprobs", logprobs)
    if ids.shape != logprobs.shape or ids.shape[:-1] != lead:
        raise ValueError(
            f"teacher_topk has ids {tuple(ids.shape)} and logprobs {tuple(logprobs.shape)}, "
            f"but needs {(*lead, 'k')} for both"
        )
    width = ids.shape[-1]
    ids = picked.pick(ids.detach().reshape(lead.numel(), width).to(device).long())
    logprobs = picked.pick(logprobs.detach().reshape(lead.numel(), width).to(device)).to(dtype)
    ids = ids.masked_fill(~(logprobs > MISSING_LOGPROB), -1)  # also -inf, and NaN for null
    if ids.numel():
        ordered = ids.sort(-1).values
        twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
        positive = (logprobs > 0) & (ids >= 0)
        low, high, twice, positive = torch.stack([*ids.aminmax(), twice.sum(), positive.sum()]).tolist()
        if low < -1 or high >= vocabulary:
            wrong = low if low < -1 else high
            raise ValueError(f"teacher_topk holds id {wrong}, outside the vocabulary of {vocabulary} ids")
        if twice:
            raise ValueError(f"teacher_topk lists an id twice in a row ({twice} repeated entries)")
        if positive:
            raise ValueError(
                f"teacher_topk holds {positive} logprobs above 0: pass log-probabilities, not logits"
            )
    if picked.privilege_weight is not None and picked.labels is not None:
        lacking = int((~(ids == picked.labels[:, None]).any(-1)).sum())
        if lacking:
            raise ValueError(
                f"privilege_weight needs the teacher's log-prob of every label, and teacher_topk lacks it in {lacking} "
                f"of {picked.count} rows"
            )
    return ids, logprobs


def same_logits(student: Tensor, teacher: Tensor) -> None:
    if student.shape[-1] != teacher.shape[-1]:
        raise ValueError(
            f"student_logits have a vocabulary of {student.shape[-1]} and teacher_logits of {teacher.shape[-1]}: slice "
            "both to the tokenizer's own size (padded heads differ, the ids that exist do not)"
        )
    if student.shape != teacher.shape:
        raise ValueError(
            f"student_logits have shape {tuple(student.shape)} but teacher_logits {tuple(teacher.shape)}: "
            "row n must be the same token on both sides"
        )


def same_vocabulary(student: Tensor, teacher: Tensor) -> None:
    if student.shape[0] != teacher.shape[0]:
        raise ValueError(
            f"student_weight has a vocabulary of {student.shape[0]} and teacher_weight of {teacher.shape[0]}: slice "
            "both to the tokenizer's own size (padded heads differ, the ids that exist do not)"
        )


def head(side: str, hidden: Any, weight: Any, bias: Any) -> None:
    """Hidden states (..., H), a weight (V, H) and an optional bias (V,) that belong together."""
    float_tensor(f"{side}_hidden", hidden)
    float_tensor(f"{side}_weight", weight)
    if weight.numel() == 0:
        raise ValueError(
            f"{side}_weight is empty, shape {tuple(weight.shape)}: gather the shards of a partitioned parameter first"
        )
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"{side}_hidden has size {hidden.shape[-1]} and its head weight has shape {tuple(weight.shape)}: "
            f"it must be (V, {hidden.shape[-1]})"
        )
    if bias is not None:
        float_tensor(f"{side}_bias", bias)
        if bias.shape != weight.shape[:1]:
            raise ValueError(
                f"{side}_bias has shape {tuple(bias.shape)} but its head has {weight.shape[0]} ids"
            )


def projection(
    logit_scale: float, logit_softcap: float | None, chunk_size: int | None, grad_filter: Any
) -> None:
    if not math.isfinite(logit_scale):
        raise ValueError(f"logit_scale={logit_scale} must be finite")
    if logit_softcap is not None and not logit_softcap > 0:
        raise ValueError(f"logit_softcap={logit_softcap} must be positive, or None for no cap")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size} must be at least 1 row, or None")
    if grad_filter is not None and not grad_filter >= 0:
        raise ValueError(f"grad_filter={grad_filter} must be at least 0, or None for exact gradients")
