"""The data that travels through a step, as structs.

Shape legend: B rollouts, T packed tokens of one side, N supervised (student-written) tokens of the whole batch,
L latent tokens of one rollout (experiences x queries), H hidden size, V vocabulary.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lopd_fast.bank import Experience
from lopd_fast.envs.base import Message, Task
from lopd_fast.prefix_tree import Packed


@dataclass
class Rollout:
    """One episode as it was sampled: token ids end to end, never re-tokenised."""

    task: Task
    messages: list[Message]  # the conversation before the first action
    response_ids: list[int]  # everything after the prompt: sampled actions and rendered observations
    student_mask: list[bool]  # True where the student sampled the token
    reward: float
    steps: list[dict[str, str]] = field(default_factory=list)  # {"action", "observation"} of every turn
    experiences: list[Experience] = field(default_factory=list)
    truncated: bool = False

    @property
    def advantage(self) -> float:
        """A = 2 r - 1."""
        return 2.0 * self.reward - 1.0

    @property
    def action(self) -> str:
        """The last action's text."""
        return self.steps[-1]["action"] if self.steps else ""


@dataclass
class Side:
    """One model's view of the batch: packed sequences, and where the supervised tokens are predicted from."""

    packed: Packed  # T distinct tokens; slot positions hold the pad id
    rows: Tensor  # (N,) int64 into the T tokens: the place whose output predicts the token
    slots: Tensor  # (total latents,) int64 into the T tokens; empty on the student's side

    def to(self, device: torch.device) -> "Side":
        """The same view on `device`."""
        return Side(self.packed.to(device), self.rows.to(device), self.slots.to(device))


@dataclass
class StepBatch:
    """Student and teacher views of the same supervised tokens, row n being the same token on both sides."""

    rollouts: list[Rollout]
    student: Side
    teacher: Side
    targets: Tensor  # (N,) int64: the sampled tokens a_n
    advantages: Tensor  # (N,) fp32: A of the rollout that token n belongs to

    @property
    def num_tokens(self) -> int:
        """N, the supervised tokens."""
        return self.targets.numel()

    def to(self, device: torch.device) -> "StepBatch":
        """The same batch on `device`."""
        return StepBatch(
            self.rollouts,
            self.student.to(device),
            self.teacher.to(device),
            self.targets.to(device),
            self.advantages.to(device),
        )


@dataclass
class StepMetrics:
    """What one step reports; means are over supervised tokens unless named otherwise; NaN: not measured."""

    step: int
    beta: float  # the dual variable used in this step
    reward: float
    tokens: int
    response_tokens: float  # mean per rollout
    divergence: str
    loss: float = math.nan
    kl: float = math.nan  # D, nats
    delta: float = math.nan  # Delta = mean of A_n delta_n, to be held against the margin
    anchor: float = math.nan
    student_mass: float = math.nan
    teacher_mass: float = math.nan
    entropy: float = math.nan  # of the student's sampled-token estimate, nats
    student_grad_norm: float = math.nan
    composer_grad_norm: float = math.nan
    seconds: float = 0.0
    skipped: bool = False
    bank_size: int = 0
    dropped: int = 0  # rollouts that were too long with the teacher's prompt, or empty
    group_rewards: dict[str, float] = field(default_factory=dict)  # mean reward by group of tasks
    teacher_gap: float = math.nan  # KL(z+ || z-), see monitors.py
    teacher_reward: float = math.nan
    reward_gap: float = math.nan  # teacher's less student's, on the same tasks
    tokens_per_second: float = 0.0  # `tokens` over the whole step's time
    messages: list[str] = field(default_factory=list)  # what was said of this step
    peak_mib: float = 0.0  # CUDA: of this step; CPU: of the process so far
    phases: dict[str, float] = field(default_factory=dict)  # seconds of each part of the step
