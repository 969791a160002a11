"""The support of a row: exact top-k without a sort over the vocabulary, and vocabularies split over processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

BLOCK = 64  # columns per block of the top-k search
SEARCH_BYTES = 64 << 20  # of keys and candidates that a search may hold, whatever k is
KEY_BYTES = 40  # a candidate's value, id and key, and what sorting them takes
NEG_INF = float("-inf")


def _first_k(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Values and positions of the k largest per row, ties to the lowest position (torch.topk promises no order)."""
    if values.dtype != torch.float32:
        values, positions = torch.sort(values, dim=-1, descending=True, stable=True)
        return values[:, :k], positions[:, :k]
    # One integer per element whose order is that of (value, lower position): then no two are equal.
    last = values.shape[1] - 1
    bits = (values + 0.0).view(torch.int32)  # + 0.0 makes one zero of two
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    backwards = last - torch.arange(last + 1, device=values.device)
    keys = (rising.long() << 32) | backwards
    positions = last - (keys.topk(k, dim=-1).values & 0xFFFFFFFF)
    return values.gather(1, positions), positions


def block_maxima(logits: Tensor) -> Tensor:
    """The largest of every 64 columns of a row, and of the rest at its end  # (R, V) -> (R, ceil(V / 64))."""
    whole = logits.shape[1] // BLOCK * BLOCK
    maxima = logits[:, :whole].unflatten(1, (whole // BLOCK, BLOCK)).amax(-1)
    if whole < logits.shape[1]:
        maxima = torch.cat([maxima, logits[:, whole:].amax(-1, keepdim=True)], dim=1)
    return maxima


def exact_topk(logits: Tensor, k: int, maxima: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The k largest logits per row and their ids, by falling logit, ties to the lowest id.

    logits  # (R, V), any strides, k <= V
    maxima  # their `block_maxima`, if they are at hand
    Only the k blocks with the largest maxima can hold a top-k element: an element of any other block is preceded by
    the maximum of each of those k. So one pass over V for the maxima, then k * 64 candidates per row.
    """
    step = max(1, SEARCH_BYTES // (KEY_BYTES * min(logits.shape[1], k * BLOCK)))
    known = [None] * -(-len(logits) // step) if maxima is None else maxima.split(step)
    found = [_exact_topk(*part, k) for part in zip(logits.split(step), known or [None], strict=True)]
    values, ids = zip(*found, strict=True)
    return torch.cat(values), torch.cat(ids)


def _exact_topk(logits: Tensor, maxima: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    width = logits.shape[1]
    if width // BLOCK <= k:
        return _first_k(logits, k)
    maxima = block_maxima(logits) if maxima is None else maxima
    chosen = _first_k(maxima, k)[1].sort(-1).values  # rising, so that positions order candidates by id
    ids = chosen[:, :, None] * BLOCK + torch.arange(BLOCK, device=logits.device)  # (R, k, 64)
    ids = ids.flatten(1)
    candidates = logits.gather(1, ids.clamp(max=width - 1)).masked_fill_(ids >= width, NEG_INF)
    values, positions = _first_k(candidates, k)
    return values, ids.gather(1, positions)


@dataclass(frozen=True)
class VocabShard:
    """The columns [first, first + width) of a vocabulary of `total` ids that this process holds.

    Without a process group that is all of them, and every collective below is the identity.
    """

    first: int
    width: int
    total: int
    widths: tuple[int, ...]
    group: ProcessGroup | None = None

    @classmethod
    def of(cls, width: int, group: ProcessGroup | None, device: torch.device) -> VocabShard:
        """Shards lie in rank order and may differ in width; all processes of the group must call this."""
        if group is None:
            return cls(0, width, width, (width,))
        import torch.distributed as dist

        every = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
        dist.all_gather(every, torch.tensor([width], dtype=torch.int64, device=device), group=group)
        widths = tuple(int(w) for w in torch.cat(every).tolist())
        return cls(sum(widths[: dist.get_rank(group)]), width, sum(widths), widths, group)

    def columns(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Local columns of global ids, and which are here; those elsewhere (and padding, -1) read column 0."""
        columns = ids - self.first
        here = (columns >= 0) & (columns < self.width) & (ids >= 0)
        return columns.masked_fill(~here, 0), here

    def max(self, x: Tensor) -> Tensor:
        if self.group is not None:
            import torch.distributed as dist

            dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x

    def sum(self, x: Tensor) -> Tensor:
        if self.group is not None:
            import torch.distributed as dist

            dist.all_reduce(x, dist.ReduceOp.SUM, group=self.group)
        return x

    def topk_ids(self, logits: Tensor, k: int, maxima: Tensor | None = None) -> Tensor:
        """Global ids (R, k) of the k largest logits of the whole vocabulary, ties to the lowest id."""
        values, ids = exact_topk(logits, min(k, self.width), maxima)
        if self.group is None:
            return ids
        import torch.distributed as dist

        counts = [min(k, width) for width in self.widths]
        rows = logits.shape[0]
        padded_values = values.new_zeros(rows, max(counts))
        padded_ids = ids.new_zeros(rows, max(counts))
        padded_values[:, : values.shape[1]] = values
        padded_ids[:, : ids.shape[1]] = ids + self.first
        all_values = [torch.empty_like(padded_values) for _ in counts]
        all_ids = [torch.empty_like(padded_ids) for _ in counts]
        dist.all_gather(all_values, padded_values, group=self.group)
        dist.all_gather(all_ids, padded_ids, group=self.group)
        # In rank order equal logits already stand by rising id, and the selection keeps that order.
        values = torch.cat([v[:, :n] for v, n in zip(all_values, counts, strict=True)], dim=1)
        ids = torch.cat([i[:, :n] for i, n in zip(all_ids, counts, strict=True)], dim=1)
        return ids.gather(1, _first_k(values, k)[1])
