"""Successful rollouts on disk, as JSON lines: what cold start trains on, and what chat-turn examples are made of."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lopd_fast.batch import Rollout
from lopd_fast.envs.base import Task
from lopd_fast.errors import UserError

FIELDS = ("task", "messages", "response_ids", "student_mask", "reward", "steps", "truncated")


def save_trajectories(rollouts: Iterable[Rollout], path: Path) -> None:
    """Write rollouts, one a line, atomically."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        for rollout in rollouts:
            file.write(json.dumps(as_fields(rollout)) + "\n")
    temporary.replace(path)


def as_fields(rollout: Rollout) -> dict[str, Any]:
    """A rollout as plain data, its experiences left out."""
    task = rollout.task
    return {
        "task": {"id": task.id, "text": task.text, "group": task.group, "data": dict(task.data)},
        "messages": rollout.messages,
        "response_ids": rollout.response_ids,
        "student_mask": [int(mine) for mine in rollout.student_mask],
        "reward": rollout.reward,
        "steps": rollout.steps,
        "truncated": rollout.truncated,
    }


def from_fields(fields: Mapping[str, Any]) -> Rollout:
    """The rollout that `as_fields` took apart."""
    return Rollout(
        Task(**fields["task"]),
        fields["messages"],
        fields["response_ids"],
        [bool(mine) for mine in fields["student_mask"]],
        fields["reward"],
        fields["steps"],
        truncated=fields["truncated"],
    )


def load_trajectories(path: Path) -> list[Rollout]:
    """Read what `save_trajectories` wrote.

    Raises:
        UserError: no such file, or a line without the needed fields (with its number).
    """
    if not path.is_file():
        raise UserError(f"There are no trajectories at {path}.")
    rollouts = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            rollouts.append(from_fields(json.loads(text)))
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"{path}, line {number}: a trajectory needs {', '.join(FIELDS)} ({error!r})."
            ) from None
    return rollouts
