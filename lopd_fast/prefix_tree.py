"""Sequences packed into one row without padding, what they have in common at their start being held once.

The rollouts of a step begin alike: the same system prompt, for several rollouts of one task the same whole prompt. A
causal model computes the same states there, so the sequences are laid out as a tree: sorted, each one appends only
what it does not share with the one before it. Token q sees token k if k is on q's way from the root. Memory and time
are those of the distinct tokens, and the gradients are exact sums over the sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MASKED_TOKENS = 8192  # longest row with a mask: that grows with the square, what sharing saves does not
_OWN = torch.iinfo(torch.int32).max  # a sequence sees the whole of what it appended


@dataclass
class Packed:
    """T tokens of R sequences. Sequence r appended run r and sees the tokens of run s before position limits[r, s]."""

    ids: Tensor  # (T,) int64
    positions: Tensor  # (T,) int64: each token's position in its sequence
    runs: Tensor  # (T,) int64: the sequence, in sorted order, that appended the token
    limits: Tensor  # (R, R) int32

    def to(self, device: torch.device) -> "Packed":
        """The same tokens on `device`."""
        return Packed(*(tensor.to(device) for tensor in (self.ids, self.positions, self.runs, self.limits)))

    def mask(self, window: int | None = None) -> Tensor:
        """(T, T) bool: which token (column) each token (row) attends to, at most `window` positions back."""
        limit = self.limits[self.runs][:, self.runs]
        query, key = self.positions[:, None], self.positions[None, :]
        seen = (key < limit) & (key <= query)
        return seen if window is None else seen & (query - key < window)


def pack(
    sequences: Sequence[Sequence[int]], keys: Sequence[Sequence[int]] | None = None, share: bool = True
) -> tuple[Packed, list[Tensor]]:
    """Lay `sequences` of ids out in one row; also gives each one's path, the places (T_b,) of its tokens in that row.

    Tokens are shared where `keys` (by default the ids) agree from the start on. A position whose input is not given
    by its id, a latent slot, needs a key of its own. Without `share`, and in rows of more than MASKED_TOKENS tokens,
    every sequence stands whole.
    """
    keys = sequences if keys is None else keys
    share = share and sum(len(sequence) for sequence in sequences) <= MASKED_TOKENS
    count = len(sequences)
    order = sorted(range(count), key=lambda index: list(keys[index])) if share else list(range(count))
    ids: list[int] = []
    positions: list[int] = []
    runs: list[int] = []
    limits = torch.zeros(count, count, dtype=torch.int32)
    paths: list[list[int]] = [[] for _ in sequences]
    for run, index in enumerate(order):
        common = 0
        if share and run:
            before = order[run - 1]
            common = _common(keys[before], keys[index])
            paths[index] = paths[before][:common]
            limits[run] = limits[run - 1].clamp(max=common)
        limits[run, run] = _OWN
        appended = sequences[index][common:]
        paths[index] = paths[index] + list(range(len(ids), len(ids) + len(appended)))
        ids += appended
        positions += range(common, common + len(appended))
        runs += [run] * len(appended)
    packed = Packed(torch.tensor(ids, dtype=torch.int64), torch.tensor(positions), torch.tensor(runs), limits)
    return packed, [torch.tensor(path, dtype=torch.int64) for path in paths]


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common start."""
    shorter = min(len(left), len(right))
    return next((at for at in range(shorter) if left[at] != right[at]), shorter)
