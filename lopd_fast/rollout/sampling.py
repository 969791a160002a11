"""How a policy is sampled, and top-k with nucleus sampling that never sorts the vocabulary."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessor

from lopd_fast.config import RolloutConfig


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 is greedy; top_k 0 and top_p 1 leave the distribution whole."""

    temperature: float
    top_p: float = 1.0
    top_k: int = 0

    @classmethod
    def of(cls, config: RolloutConfig) -> "Sampling":
        """The behaviour policy of a configuration."""
        return cls(config.temperature, config.top_p, config.top_k)


GREEDY = Sampling(0.0)


class NucleusOfTopK(LogitsProcessor):
    """Keep the top_k logits and, of these, the smallest set with probability >= top_p (the usual order of the two).

    The nucleus is found among the k kept logits alone, so nothing sorts V of them. With `draws` the largest score of a
    row is then the token drawn (Gumbel's trick); without, whoever calls draws from their softmax.
    """

    def __init__(self, sampling: Sampling, draws: "OwnDraws | None" = None) -> None:
        self.sampling, self.draws = sampling, draws

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.float() / self.sampling.temperature
        count = self.sampling.top_k or (scores.shape[-1] if self.sampling.top_p < 1 else 0)
        if count == 0:
            if self.draws is None:
                return scores
            return scores + self.draws.next(torch.arange(scores.shape[-1], device=scores.device)[None])
        values, ids = scores.topk(min(count, scores.shape[-1]), dim=-1)
        if self.sampling.top_p < 1:
            probability = values.softmax(-1)
            before = probability.cumsum(-1) - probability
            values = values.masked_fill(before >= self.sampling.top_p, float("-inf"))
        if self.draws is not None:
            values = values + self.draws.next(ids)
        return torch.full_like(scores, float("-inf")).scatter(-1, ids, values)


class OwnDraws:
    """Gumbel noise for each row of a batch that follows from the row's seed, the token's place and its id alone.

    A hash of the three in place of a generator's state: the draws do not depend on which rows are sampled together.
    """

    def __init__(self, rows: Sequence[tuple[int, int]], device: torch.device) -> None:
        """`rows`: each one's seed, and the place in its episode of the token that is sampled next."""
        seeds, places = zip(*rows, strict=True)
        self._seeds = _mixed(torch.tensor([seed % 2**63 for seed in seeds], device=device)[:, None])  # (B, 1)
        self._places = torch.tensor(places, device=device)[:, None]

    def next(self, ids: Tensor) -> Tensor:
        """-log(-log(u)), u uniform in (0, 1), for ids (B or 1, k) of the next token: (B, k) fp32."""
        bits = _mixed(_mixed(self._seeds + self._places) + ids)
        self._places = self._places + 1
        uniform = (_shifted(bits, 12).double() + 0.5) * 2.0**-52
        return -torch.log(-torch.log(uniform)).float()


def _mixed(x: Tensor) -> Tensor:
    """splitmix64 (Steele, Lea and Flood, 2014) of int64 numbers, which wrap as its unsigned ones do."""
    x = x + (0x9E3779B97F4A7C15 - 2**64)
    x = (x ^ _shifted(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _shifted(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, places: int) -> Tensor:
    """x >> places with zeros moving in."""
    return (x >> places) & (2 ** (64 - places) - 1)
