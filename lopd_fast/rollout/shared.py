"""Rollouts split over the processes of a run: each samples its share of the episodes, and every one gets them all."""

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedModel

from lopd_fast.batch import Rollout
from lopd_fast.config import RolloutConfig
from lopd_fast.envs.base import Environment, Task
from lopd_fast.processes import World
from lopd_fast.render import Renderer
from lopd_fast.rollout.episodes import Progress
from lopd_fast.rollout.hf import HFRollout
from lopd_fast.rollout.sampling import Sampling
from lopd_fast.trajectories import as_fields, from_fields


class SharedRollout(HFRollout):
    """`HFRollout` over processes; an episode's tokens follow from its own seed, not from who else is in its batch."""

    def __init__(self, renderer: Renderer, config: RolloutConfig, world: World) -> None:
        super().__init__(renderer, config)
        self.world = world

    def rollouts(
        self,
        model: PreTrainedModel,
        environment: Environment,
        tasks: Sequence[Task],
        sampling: Sampling,
        *,
        seed: int,
        latents: Sequence[Tensor] | None = None,
        progress: Progress | None = None,
        seeds: Sequence[int] | None = None,
    ) -> list[Rollout]:
        """As `HFRollout.rollouts`, the same list on every process; each must ask for the same tasks."""
        seeds = seeds or [seed * 1_000_003 + order for order in range(len(tasks))]
        own = self.world.share([1] * len(tasks))
        mine = super().rollouts(
            model,
            environment,
            [tasks[order] for order in own],
            sampling,
            seed=seed,
            latents=None if latents is None else [latents[order] for order in own],
            progress=progress,
            seeds=[seeds[order] for order in own],
        )
        parts = self.world.gather([as_fields(rollout) for rollout in mine])
        everyone = [from_fields(fields) for part in parts for fields in part]
        for rollout, task in zip(everyone, tasks, strict=True):
            rollout.task = task
        if progress is not None:
            progress(len(tasks) - len(own))
        return everyone
