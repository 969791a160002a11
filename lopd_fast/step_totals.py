"""What the micro-batches of a step add up to, on the device until it is read once."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lopd_fast.batch import StepBatch, StepMetrics
from lopd_fast.losses import TopKTailKL
from lopd_fast.processes import World


@dataclass
class StepTotals:
    """Sums over micro-batches, each () on the device; `loss` and `anchor` have their denominators, the rest has not."""

    loss: Tensor
    anchor: Tensor
    kl: Tensor
    delta: Tensor
    student_mass: Tensor
    teacher_mass: Tensor
    surprise: Tensor  # -log pi_S of the sampled tokens, whose mean estimates the entropy

    @classmethod
    def zeros(cls, device: torch.device) -> "StepTotals":
        return cls(*torch.zeros(7, device=device).unbind())

    def add(self, result: TopKTailKL, batch: StepBatch, loss: Tensor) -> None:
        """Add a micro-batch; `loss` is what it contributes to the objective."""
        assert result.privilege is not None and result.student_logprob is not None
        self.loss += loss.detach()
        self.kl += result.kl.sum()
        self.delta += (batch.advantages * result.privilege).sum()
        self.student_mass += result.student_mass.sum()
        self.teacher_mass += result.teacher_mass.sum()
        self.surprise -= result.student_logprob.sum()

    def over(self, world: World) -> "StepTotals":
        """The sums over all processes."""
        return StepTotals(*world.sum(torch.stack(list(vars(self).values()))).unbind())

    def read_into(self, metrics: StepMetrics, tokens: int) -> None:
        """The one copy of a step's numbers to the host; means are over the step's `tokens`."""
        values = torch.stack(list(vars(self).values()))
        values[2:] /= tokens
        metrics.loss, metrics.anchor, metrics.kl, metrics.delta, *rest = values.tolist()
        metrics.student_mass, metrics.teacher_mass, metrics.entropy = rest
