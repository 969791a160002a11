"""A chunk of rows of the fused loss in plain torch, on a CPU one tile of the vocabulary at a time.

Per row and side, with E_j = e^{z_j - shift} outside the support and 0 on it, the gradient of a row of logits is

    factor E_j  +  explicit values at the support and the label        (`gradient_parts` in loss_rows)

where `factor` waits for both sides' statistics. E W does not: it is summed while a tile of E is in cache and scaled at
the end. So of the two sides only the one whose top-k make the support is held in full, R rows of it, because a tile can
be masked only once the support is known; the other never exists beyond a tile.

A filter finds its columns at the end, and a head that learns wants the gradient of the logits itself. Then both sides
are held in full, E in the place of the logits, and `gradient` turns it into that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lopd_fast.fused_chunk import ChunkInput
from lopd_fast.fused_filter import Explicit, GradFilter, Piece
from lopd_fast.fused_head import WEIGHT_ROWS, Head
from lopd_fast.loss_rows import (
    NEG_INF,
    SideLogprobs,
    gradient_parts,
    row_record,
    served_side,
    side_logprobs,
)
from lopd_fast.loss_support import block_maxima
from lopd_fast.scratch import is_host

TILE_BYTES = 32 << 20  # of logits that, on a CPU, stay in cache from their product to the product back
TILE_COLUMNS = 512  # at least; whole blocks of `block_maxima`


@dataclass(frozen=True)
class _Read:
    """One side of a chunk, read once."""

    logprobs: SideLogprobs
    slopes: Tensor | None  # (R, k + labels) of the soft-cap at the support and the label, if there is one
    product: Tensor | None  # (R, H) E W, if it was asked for
    shifts: list[tuple[slice, Tensor]]  # (R,) of each tile's E; the last is also that of `product`


class Chunk:
    """R rows of the fused loss, from hidden states to their record and their gradients."""

    def __init__(self, given: ChunkInput) -> None:
        self.heads, self.labels, self.options = given.heads, given.labels, given.options
        self.logits, self.tile = given.logits, given.tile
        served, options = given.served, given.options
        hidden = [head.operand_of(x) for head, x in zip(given.heads, given.hidden, strict=True)]
        shard, teacher = options.shard, len(hidden) - 1
        searched = teacher if options.support == "teacher" else 0
        self.held = len(given.logits) == len(hidden)
        self.width = given.tile.shape[1]
        if served is None:
            found = given.logits[searched if self.held else 0]
            maxima = self._project(searched, hidden[searched], found)
            ids = shard.topk_ids(found, options.k, maxima)
        else:
            ids = served[0]
        reads = []
        for i, x in enumerate(hidden):
            ready = served is None and i == searched
            space = given.logits[i] if self.held else given.logits[0] if ready else None
            reads.append(self._read(i, x, ids, space, ready, given.wanted[i]))
        if served is None:
            teacher_side = reads[teacher].logprobs
        else:
            teacher_side = served_side(*served, self.labels, shard.total)
        self.record = row_record(ids, reads[0].logprobs, teacher_side, served is not None, options)
        self.reads = reads

    def hidden_gradient(self, i: int, kl_weight: Tensor, privilege_weight: Tensor | None) -> Tensor:
        """kl_weight * d kl / d hidden + privilege_weight * d privilege / d hidden of side i  # (R, H)."""
        read = self.reads[i]
        assert read.product is not None
        tail, columns, values = self._parts(i, kl_weight, privilege_weight)
        _, factor = self._factors(i, tail)[-1]
        return read.product.mul_(factor[:, None]).add_(self.heads[i].weighted_rows(columns, values))

    def filtered_hidden_gradient(
        self, i: int, kl_weight: Tensor, privilege_weight: Tensor | None, grad_filter: GradFilter
    ) -> Tensor:
        """`hidden_gradient` of a side that is held, over the columns that matter; exact if these are too many."""
        tail, columns, values = self._parts(i, kl_weight, privilege_weight)
        head, exponentials = self.heads[i], self.logits[i]
        factors = self._factors(i, tail)
        pieces = [Piece(part, factor, factor.abs()) for part, factor in factors]
        out = grad_filter.hidden_gradient(exponentials, pieces, Explicit(columns, apart=values))
        if out is None:
            out = head.weighted_rows(columns, values)
            for (part, weight), (_, factor) in zip(head.blocks(self.width), factors, strict=True):
                out += head.product(exponentials[:, part], weight).mul_(factor[:, None])
        return out

    def gradient(self, i: int, kl_weight: Tensor, privilege_weight: Tensor | None, out: Tensor) -> None:
        """Leaves kl_weight * d kl / d (h W^T + b) + privilege_weight * d privilege / d (h W^T + b) of side i in out.

        out  # (R, V), the logits that hold this side
        """
        assert self.held and out.data_ptr() == self.logits[i].data_ptr()
        tail, columns, values = self._parts(i, kl_weight, privilege_weight)
        for part, factor in self._factors(i, tail):
            out[:, part].mul_(factor[:, None])
        out.scatter_add_(1, columns, values)

    def _factors(self, i: int, tail: Tensor) -> list[tuple[slice, Tensor]]:
        """(R,) of E, for every tile."""
        lse = self.record.sides[i].tail_lse
        return [(part, tail * (shift - lse).exp()) for part, shift in self.reads[i].shifts]

    def _parts(
        self, i: int, kl_weight: Tensor, privilege_weight: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`gradient_parts` with respect to h W^T + b."""
        chain, slopes = self.heads[i].chain, self.reads[i].slopes
        margin = None if privilege_weight is None else chain * privilege_weight
        ids, shard = self.record.outputs.ids, self.options.shard
        parts = gradient_parts(self.record.sides[i], ids, chain * kl_weight, margin, self.labels, shard)
        if slopes is None:
            return parts
        tail, columns, values = parts
        return tail, columns, values * slopes[:, : columns.shape[1]]

    def _project(self, i: int, hidden: Tensor, logits: Tensor) -> Tensor:
        """Fills the logits of a side and returns their `block_maxima`."""
        maxima = []
        for part, weight in self.heads[i].blocks(self.width):
            self.heads[i].project(hidden, part, weight, logits[:, part])
            maxima.append(block_maxima(logits[:, part]))
        return torch.cat(maxima, dim=1)

    def _read(
        self, i: int, hidden: Tensor, ids: Tensor, logits: Tensor | None, ready: bool, wanted: bool
    ) -> _Read:
        """Reads a side tile by tile, leaving E in `logits` if there are any; `ready`: they have been projected."""
        head, shard, k = self.heads[i], self.options.shard, ids.shape[1]
        rows = len(hidden)
        columns, here = shard.columns(
            ids if self.labels is None else torch.cat([ids, self.labels[:, None]], 1)
        )
        picked = ids.new_full(columns.shape, NEG_INF, dtype=head.dtype)
        shift, total = picked.new_full((rows,), NEG_INF), picked.new_zeros(rows)
        product = picked.new_zeros(rows, hidden.shape[1]) if wanted else None
        shifts = []
        for part, weight in head.blocks(self.width):
            count = part.stop - part.start
            tile = (
                self.tile.flatten()[: rows * count].view(rows, count) if logits is None else logits[:, part]
            )
            if not ready:
                head.project(hidden, part, weight, tile)
            inside = here & (columns >= part.start) & (columns < part.stop)
            local = (columns - part.start).masked_fill_(~inside, 0)
            picked = torch.where(inside, tile.gather(1, local), picked)
            slope = head.slope(tile)
            hide = torch.zeros_like(picked[:, :k]).masked_fill_(inside[:, :k], NEG_INF)
            tile.scatter_add_(1, local[:, :k], hide)

            before, shift = shift, torch.maximum(shift, tile.amax(1))
            shifts.append((part, shift))
            finite = shift.masked_fill(shift == NEG_INF, 0.0)
            fade = (before - finite).exp()
            tile.sub_(finite[:, None]).exp_()
            total = total.mul_(fade).add_(tile.sum(1))
            if slope is not None:
                tile.mul_(slope)
            if product is not None:
                head.add_product(product.mul_(fade[:, None]), tile, weight)
        logprobs = side_logprobs(
            picked[:, :k], None if self.labels is None else picked[:, k], shift, total, shard
        )
        slopes = head.slope(picked.masked_fill(~here, 0.0))
        return _Read(logprobs, slopes, product, shifts)


def tile_columns(rows: int, heads: list[Head]) -> int:
    """Columns of a tile of `rows` rows: what stays in cache, on a device all; but no more than is widened at a time."""
    columns = len(heads[0].weight)
    if is_host(heads[0].weight.device):
        most = TILE_BYTES // (max(rows, 1) * heads[0].dtype.itemsize) // TILE_COLUMNS * TILE_COLUMNS
        columns = min(columns, max(TILE_COLUMNS, most))
    return min(columns, WEIGHT_ROWS) if any(head.widens for head in heads) else columns
