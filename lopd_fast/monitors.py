"""What is measured beside a step, at its own (theta, phi) and before its update, and changes nothing of it.

KL(z+ || z-): whether the teacher heeds what it is shown. A few of the step's rollouts are read by two teachers, one
    with the experiences retrieved for the task, one with experiences of others; nats a token. Near 0 the latents say
    nothing about the task, and the student can learn nothing from them.
reward gap: whether the teacher is worth following. It acts itself on some of the step's tasks; its mean reward less
    the student's on the same tasks.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from lopd_fast.batch import Rollout
from lopd_fast.build import Parts
from lopd_fast.evaluation import pass_rate, teacher_gap, teacher_rollouts
from lopd_fast.metrics import LOW_GAP
from lopd_fast.pack import micro_batches
from lopd_fast.retrieval import negatives
from lopd_fast.rollout.sampling import Sampling

MOST_GROUPS = 8  # rewards are reported by group up to here


@dataclass(frozen=True)
class Readings:
    """One step's; NaN where nothing was measured."""

    teacher_gap: float = math.nan  # KL(z+ || z-), nats a token
    teacher_reward: float = math.nan  # mean over the tasks that the teacher attempted
    reward_gap: float = math.nan  # teacher less student, on these tasks


class Monitors:
    """Takes the readings of every step; `say` hears once when the gap falls below LOW_GAP."""

    def __init__(self, parts: Parts, say: Callable[[str], None]) -> None:
        self.parts, self.say = parts, say
        self.low_gap = False  # part of a checkpoint, so that a resumed run says the same

    def read(self, rollouts: Sequence[Rollout], step: int) -> Readings:
        """Readings of step `step` (from 0) on its rollouts; no generator, weight, bank or role is other afterwards."""
        config = self.parts.config
        if not config.objective.use_latents:
            return Readings()
        monitor, seed = config.monitor, config.train.seed * 1_000_003 + step
        gap = teacher = difference = math.nan
        with undisturbed(), torch.no_grad():
            if monitor.gap_every and step % monitor.gap_every == 0:
                gap = step_gap(self.parts, rollouts, monitor.gap_rollouts, seed)
            if monitor.reward_every and step % monitor.reward_every == 0:
                chosen = rollouts[: monitor.reward_tasks]
                teacher = teacher_reward(self.parts, chosen, seed)
                difference = teacher - pass_rate(chosen)
        self._warn(gap, step)
        return Readings(gap, teacher, difference)

    def _warn(self, gap: float, step: int) -> None:
        if math.isnan(gap):
            return
        low = gap < LOW_GAP
        if low and not self.low_gap:
            self.say(
                f"warning: step {step + 1}: right and other experiences move the teacher apart by only {gap:.3f} nats "
                f"a token (under {LOW_GAP}); what it is shown says little of the task."
            )
        self.low_gap = low


def step_gap(parts: Parts, rollouts: Sequence[Rollout], most: int, seed: int) -> float:
    """KL(z+ || z-) on up to `most` of the rollouts that have experiences and for which the bank has others."""
    written = [rollout for rollout in rollouts if rollout.experiences and any(rollout.student_mask)]
    shown = [rollout.experiences for rollout in written]
    others = negatives(parts.bank, [rollout.task for rollout in written], shown, seed=seed, most=most)
    chosen = [rollout for rollout, found in zip(written, others, strict=True) if found]
    left = iter(found for found in others if found)
    total, tokens = 0.0, 0
    for group in micro_batches(chosen, parts.config.train.micro_batch_tokens, parts.renderer):
        positive, negative = [rollout.experiences for rollout in group], [next(left) for _ in group]
        count = sum(sum(rollout.student_mask) for rollout in group)
        total += count * teacher_gap(
            parts.backbone, parts.composer, parts.renderer, group, positive, negative
        )
        tokens += count
    return total / tokens if tokens else math.nan


def teacher_reward(parts: Parts, rollouts: Sequence[Rollout], seed: int) -> float:
    """Mean reward of the teacher on the tasks of `rollouts`, with the experiences that were retrieved for each."""
    acted = teacher_rollouts(
        parts.backbone,
        parts.composer,
        parts.engine,
        parts.environment,
        [rollout.task for rollout in rollouts],
        [rollout.experiences for rollout in rollouts],
        Sampling.of(parts.config.rollout),
        seed=seed,
    )
    return pass_rate(acted)


def rewards_by_group(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Mean reward of each group of tasks in the step; {} if they have no groups, or too many to look at."""
    rewards: dict[str, list[float]] = {}
    for rollout in rollouts:
        rewards.setdefault(rollout.task.group, []).append(rollout.reward)
    if len(rewards) > MOST_GROUPS or set(rewards) == {""}:
        return {}
    return {group: sum(values) / len(values) for group, values in sorted(rewards.items())}


@contextmanager
def undisturbed() -> Iterator[None]:
    """Every generator that an environment or a model may draw from, as it was before."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
