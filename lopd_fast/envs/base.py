"""The environment protocol: a task opens an episode, the episode answers one action text at a time.

An environment never sees tokens. The rollout engine renders `Episode.messages`, samples an action, hands its
text to `Episode.step`, and renders the observation as the next user turn. Which tokens the student wrote is
known to the rollout engine alone, because it sampled them.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

from lopd_fast.errors import UserError

Message = dict[str, str]  # {"role": "system" | "user" | "assistant", "content": text}


@dataclass(frozen=True)
class Task:
    """One task. `text` is what is asked, of the retriever too; `data` belongs to the environment."""

    id: str
    text: str
    group: str = ""  # a label to report results by (the demo: the company)
    data: Mapping[str, Any] = field(default_factory=dict)


class StepResult(NamedTuple):
    """What an action led to: `observation` is the next user turn, or, when `done`, `reward` in [0, 1] counts."""

    observation: str
    reward: float
    done: bool


class Episode(Protocol):
    """One attempt at one task."""

    @property
    def messages(self) -> Sequence[Message]:
        """The conversation before the first action."""
        ...

    def step(self, action: str) -> StepResult:
        """Take one action text; never raises for what a model wrote: a bad action is an observation or reward 0."""
        ...


class Environment(Protocol):
    """Tasks by split, and episodes for them."""

    name: str
    max_turns: int

    def tasks(self, split: str, count: int, seed: int) -> list[Task]:
        """`count` tasks of `split` ("train" | "heldout"), the same ones for the same seed; the splits never overlap."""
        ...

    def start(self, task: Task) -> Episode:
        """Open an episode of `task`."""
        ...


@runtime_checkable
class Demonstrator(Protocol):
    """An environment that can show how a task is solved, for seed demonstrations. Single-turn tasks."""

    def solution(self, task: Task) -> str:
        """An action that solves `task`."""
        ...


def check_tasks(tasks: Sequence[Task], split: str, environment: str) -> None:
    """Refuse what an environment must not give as tasks, before any work is done.

    Raises:
        UserError: no tasks, one with no text, two of one id, or data that JSON cannot hold.
    """
    if not tasks:
        raise UserError(f"The environment {environment} has no tasks for the split {split}.")
    blank = next((task for task in tasks if not task.text.strip()), None)
    if blank is not None:
        raise UserError(f"Task {blank.id!r} of the environment {environment} has no text.")
    try:
        json.dumps([dict(task.data) for task in tasks])
    except (TypeError, ValueError) as error:
        raise UserError(
            f"Task.data of the environment {environment} must be plain JSON values: {error}."
        ) from None


def check_result(result: object, task: Task) -> None:
    """Refuse what an episode must not return.

    Raises:
        UserError: not a StepResult, or a final reward outside [0, 1].
    """
    if not isinstance(result, StepResult):
        raise UserError(
            f"The episode of task {task.id!r} returned a {type(result).__name__}, not a StepResult."
        )
    if result.done and not (math.isfinite(result.reward) and 0.0 <= result.reward <= 1.0):
        raise UserError(
            f"The episode of task {task.id!r} gave the reward {result.reward}, which must be in [0, 1]."
        )
