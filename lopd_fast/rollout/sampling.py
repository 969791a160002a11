"""How a policy is sampled, and top-k with nucleus sampling that never sorts the vocabulary."""

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

    The nucleus is found among the k kept logits alone, so nothing sorts V of them.
    """

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.float() / self.sampling.temperature
        count = self.sampling.top_k or (scores.shape[-1] if self.sampling.top_p < 1 else 0)
        if count == 0:
            return scores
        values, ids = scores.topk(min(count, scores.shape[-1]), dim=-1)
        if self.sampling.top_p < 1:
            probability = values.softmax(-1)
            before = probability.cumsum(-1) - probability
            values = values.masked_fill(before >= self.sampling.top_p, float("-inf"))
        return torch.full_like(scores, float("-inf")).scatter(-1, ids, values)
