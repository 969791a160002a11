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
    values: Tensor  # (R, m)
    apart: bool  # to be added to the values, which are 0 there; else they are among them


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
        head = self.head
        shares = self.shares(values, pieces, explicit)
        active = self.active(shares, explicit)
        indices = [active[piece.columns].nonzero().squeeze(1) for piece in pieces]
        if 2 * sum(len(index) for index in indices) > len(shares):
            return None
        if self.typical is None:
            shares = shares.clamp(1e-3, 1)  # at least that, so that what is left of them does not cancel
            row = head.weight.new_zeros(1, head.weight.shape[1], dtype=head.dtype)
            for part, weight in head.blocks():
                head.add_product(row, shares[None, part], weight)
            self.typical = shares, row[0]
        shares, row = self.typical
        share = shares.sum()
        rows = len(explicit.values)
        out = head.weight.new_zeros(rows, head.weight.shape[1], dtype=head.dtype)
        left = out.new_zeros(rows)
        # Written over by every step: fresh memory costs a CPU more than the gather itself.
        step = max(1, min(WEIGHT_ROWS, max(len(index) for index in indices)))
        parts, gathered = out.new_empty(rows * step), head.weight.new_empty(step, head.weight.shape[1])
        for piece, index in zip(pieces, indices, strict=True):
            if not self.balanced:
                total = values[:, piece.columns].sum(1, dtype=head.dtype)
                left += total if piece.factor is None else total * piece.factor
            for ids in (index + piece.columns.start).split(step):
                part = parts[: rows * len(ids)].view(rows, -1)
                torch.index_select(values, 1, ids, out=part)
                if piece.factor is not None:
                    part.mul_(piece.factor[:, None])
                weight = head.operand_of(torch.index_select(head.weight, 0, ids, out=gathered[: len(ids)]))
                head.add_product(out, part, weight)
                left -= part.sum(1, dtype=head.dtype)
                row = row - head.product(shares[None, ids], weight)[0]
                share = share - shares[ids].sum()
        if explicit.apart:
            out += head.weighted_rows(explicit.columns, explicit.values)
            if self.balanced:
                left -= explicit.values.sum(1)
        return out.addr_(left, row / share)

    @staticmethod
    def active(shares: Tensor, explicit: Explicit) -> Tensor:
        """Which columns matter  # (V,) bool."""
        return (shares > 1).index_fill_(0, explicit.columns.flatten(), True)

    def shares(self, values: Tensor, pieces: Sequence[Piece], explicit: Explicit) -> Tensor:
        """For every column its share of what makes one matter  # (V,).

        That is the sum of |gradient| over the R rows, which is at least the column's 2-norm, over

            sqrt(R) * cut * min(scale, the largest of the gradient)
        """
        largest = explicit.values.abs().amax().to(self.head.dtype)
        limit = self.cut * len(explicit.values) ** 0.5 * torch.minimum(self.scale, largest)
        sums = [self.head.product(piece.sign[None], values[:, piece.columns])[0] for piece in pieces]
        return torch.cat(sums).abs_().div_(limit.clamp(min=torch.finfo(self.head.dtype).tiny))
