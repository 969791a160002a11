"""`grad_filter`: the hidden gradient over the columns that matter, with one typical row of the head for the others.

See docs/grad-filter.md for what it leaves out, what that costs and what it saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lopd_fast.fused_head import WEIGHT_ROWS, Head


@dataclass(frozen=True)
class Piece:
    """Some columns of the gradient with respect to h W^T + b, which there is factor_n * values_nj."""

    columns: slice
    factor: Tensor | None  # (R,), None: 1
    sign: Tensor  # (R,) sum_n sign_n values_nj is, but for its own sign, sum_n |gradient_nj|


@dataclass(frozen=True)
class Explicit:
    """What the gradient holds at the support and the labels: the largest of it, and columns that always matter."""

    columns: Tensor  # (R, m)
    apart: Tensor | None  # (R, m) to be added to the values, which are 0 there; None: they are among them


class GradFilter:
    """The filter of one head over the chunks of a call."""

    def __init__(self, head: Head, cut: float, scale: Tensor, whole: bool) -> None:
        """
        cut    # the threshold
        scale  # () the largest weight of a row
        whole  # the head is not a shard of the vocabulary
        """
        self.head, self.cut, self.scale = head, cut, scale
        # A gradient of a softmax sums to 0 over the vocabulary; rounded to halves it does so too roughly.
        self.balanced = whole and head.cap is None and not head.native
        self.typical: tuple[Tensor, Tensor] | None = None  # shares (V,) and their row of the head (H,)

    def hidden_gradient(self, values: Tensor, pieces: Sequence[Piece], explicit: Explicit) -> Tensor | None:
        """From values  # (R, V) to (R, H), or None if more than half of the columns matter: then exact is cheaper.

        The typical row weighs the rows of the head that do not matter by what their columns held in the first chunk:
        nearly all of it is a small pull of one sign on most of the vocabulary.
        """
        head, (rows, width) = self.head, values.shape
        limit = self.limit(values, explicit)
        kept = torch.zeros(width, dtype=torch.bool, device=values.device)
        kept.index_fill_(0, explicit.columns.flatten(), True)
        first, every = self.typical is None, []
        out = head.weight.new_zeros(rows, head.weight.shape[1], dtype=head.dtype)
        left, taken, row_taken, active = out.new_zeros(rows), out.new_zeros(()), torch.zeros_like(out[0]), 0
        # Written over by every step: fresh memory costs a CPU more than the gather itself.
        step = max(1, min(WEIGHT_ROWS, width // 2))
        parts, gathered = values.new_empty(rows * step), head.weight.new_empty(step, head.weight.shape[1])
        for piece in pieces:  # each is gathered while what was summed of it is still in cache
            shares = self.shares(values, piece, limit)
            index = self.active(shares, kept[piece.columns]).nonzero().squeeze(1)
            active += len(index)
            if 2 * active > width:
                return None
            if first:
                # At least that, so that what is left of them does not cancel.
                every.append(shares.clamp(1e-3, 1))
            typical = every[-1] if self.typical is None else self.typical[0][piece.columns]
            if not self.balanced:
                total = values[:, piece.columns].sum(1, dtype=head.dtype)
                left += total if piece.factor is None else total * piece.factor
            for columns in index.split(step):
                ids = columns + piece.columns.start
                part = parts[: rows * len(ids)].view(rows, -1)
                torch.index_select(values, 1, ids, out=part)
                if piece.factor is not None:
                    part.mul_(piece.factor[:, None])
                weight = head.operand_of(torch.index_select(head.weight, 0, ids, out=gathered[: len(ids)]))
                head.add_product(out, part, weight)
                left -= part.sum(1, dtype=head.dtype)
                row_taken += head.product(typical[None, columns], weight)[0]
                taken += typical[columns].sum()
        if self.typical is None:
            self.typical = self._typical(torch.cat(every))
        if explicit.apart is not None:
            out += head.weighted_rows(explicit.columns, explicit.apart)
            if self.balanced:
                left -= explicit.apart.sum(1)
        shares, row = self.typical
        return out.addr_(left, (row - row_taken) / (shares.sum() - taken))

    @staticmethod
    def active(shares: Tensor, kept: Tensor) -> Tensor:
        """Which columns matter  # (C,) bool."""
        return (shares > 1) | kept

    def limit(self, values: Tensor, explicit: Explicit) -> Tensor:
        """What the |gradients| of a column must sum to over the R rows, to matter  # ().

        That sum is at least the column's 2-norm. The limit is sqrt(R) * cut * min(scale, the largest of the gradient).
        """
        own = values.gather(1, explicit.columns) if explicit.apart is None else explicit.apart
        largest = (
            own.abs().amax().to(self.head.dtype) if own.numel() else self.scale
        )  # a served list may be empty
        limit = self.cut * len(values) ** 0.5 * torch.minimum(self.scale, largest)
        return limit.clamp(min=torch.finfo(self.head.dtype).tiny)

    def shares(self, values: Tensor, piece: Piece, limit: Tensor) -> Tensor:
        """The sum of |gradient| over the rows for every column of a piece, over the limit  # (C,)."""
        return self.head.product(piece.sign[None], values[:, piece.columns])[0].abs_().div_(limit)

    def _typical(self, shares: Tensor) -> tuple[Tensor, Tensor]:
        head = self.head
        row = head.weight.new_zeros(1, head.weight.shape[1], dtype=head.dtype)
        for part, weight in head.blocks():
            head.add_product(row, shares[None, part], weight)
        return shares, row[0]
