"""One experience: a task and the linearised trace of a rollout that solved it, and how such lines are read."""

import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lopd_fast.errors import UserError

OBSERVATION_LIMIT = 300  # characters of each observation that a trace keeps


@dataclass(frozen=True, slots=True)
class Experience:
    """A rollout, as the bank keeps it. Raises UserError for text that is empty and numbers that are not finite.

    id: unique in a bank; "" takes a hash of (group, task, trace).
    task: what the retriever is asked with. trace: "action -> result" lines, see `linearise`.
    reward: what the environment gave. quality: kept per entry for whoever ranks or filters; default: the reward.
    group: a label to restrict retrieval by (the demo: the company). source: where it came from.
    """

    id: str
    task: str
    trace: str
    reward: float
    quality: float = math.nan  # nan stands for "not given"
    group: str = ""
    source: str = "rollout"

    def __post_init__(self) -> None:
        for name in ("id", "task", "trace", "group", "source"):
            if not isinstance(getattr(self, name), str):
                raise UserError(f"{name} must be text, not {getattr(self, name)!r}.")
            try:  # a lone surrogate is legal in JSON, but no tokenizer and no file takes it
                getattr(self, name).encode()
            except UnicodeEncodeError as error:
                raise UserError(f"{name} is not valid Unicode ({error}).") from error
        for name in ("task", "trace"):
            if not getattr(self, name).strip():
                raise UserError(f"{name} is empty: there is nothing to embed.")
        if not _is_number(self.reward):
            raise UserError(f"reward must be a finite number, not {self.reward!r}.")
        given = self.quality == self.quality  # not nan
        if given and not _is_number(self.quality):
            raise UserError(f"quality must be a finite number, not {self.quality!r}.")
        object.__setattr__(self, "reward", float(self.reward))
        object.__setattr__(self, "quality", float(self.quality) if given else self.reward)
        if not self.id:
            object.__setattr__(self, "id", hashlib.sha256(repr(self.content).encode()).hexdigest()[:16])

    @property
    def content(self) -> tuple[str, str, str]:
        """What makes two experiences the same one: (group, task, trace)."""
        return self.group, self.task, self.trace


def linearise(steps: Iterable[Mapping[str, str]], observation_limit: int | None = OBSERVATION_LIMIT) -> str:
    """Turn [{"action": ..., "observation": ...}] into a trace, one "action -> result" line for each step.

    An observation is put on one line and cut to `observation_limit` characters, of which the last is an ellipsis
    where something was cut; None keeps all of it, 0 keeps the actions alone. A step without a result is its action.
    """
    if observation_limit is not None and observation_limit < 0:
        raise UserError(f"observation_limit is {observation_limit}: give 0 or more characters.")
    lines = []
    for step in steps:
        result = " ".join(step.get("observation", "").split())
        if observation_limit is not None and len(result) > observation_limit:
            result = result[: observation_limit - 1] + "…" if observation_limit else ""
        action = step["action"].strip()
        lines.append(f"{action} -> {result}" if result else action)
    return "\n".join(lines)


def read_experiences(
    path: str | Path,
    *,
    observation_limit: int | None = OBSERVATION_LIMIT,
    on_bytes: Callable[[int], None] | None = None,
) -> Iterator[Experience]:
    """Yield the experiences of a JSON-lines file, of any reward; blank lines are passed over.

    A line has `task`, `reward`, and `trace` or `steps`; `id`, `quality`, `group` and `source` are optional, other
    fields are ignored. `on_bytes` hears the bytes of each line read. Raises UserError, with file and line number, at
    the first line that cannot be used.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path} is not a file: give a JSON-lines file of rollouts.")
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if on_bytes is not None:
                on_bytes(len(line))
            if line.strip():
                try:
                    yield _parse(line, observation_limit)
                except UserError as error:
                    raise UserError(f"{path}, line {number}: {error}") from error


def _parse(line: bytes, observation_limit: int | None) -> Experience:
    try:
        fields = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"not a line of JSON in UTF-8 ({error}).") from error
    if not isinstance(fields, dict):
        raise UserError(f"expected a JSON object, found {type(fields).__name__}.")
    missing = [name for name in ("task", "reward") if name not in fields]
    if "trace" not in fields and "steps" not in fields:
        missing.append("trace (or steps)")
    if missing:
        present = ", ".join(sorted(fields)) or "none"
        raise UserError(f"missing {', '.join(missing)}; the fields present are: {present}.")
    if "trace" in fields:
        trace = fields["trace"]
    else:
        _check_steps(fields["steps"])
        trace = linearise(fields["steps"], observation_limit)
    optional = {name: fields[name] for name in ("quality", "group", "source") if fields.get(name) is not None}
    if "quality" in optional and not _is_number(optional["quality"]):
        raise UserError(f"quality must be a finite number, not {optional['quality']!r}.")
    identity = fields.get("id")
    identity = str(identity) if isinstance(identity, int) else identity or ""
    return Experience(identity, fields["task"], trace, fields["reward"], **optional)


def _check_steps(steps: Any) -> None:
    if not isinstance(steps, list):
        raise UserError(f"steps must be a list of objects, found {type(steps).__name__}.")
    for index, step in enumerate(steps):
        if not isinstance(step, dict) or not isinstance(step.get("action"), str):
            raise UserError(f'steps[{index}] needs the text field "action".')
        if not isinstance(step.get("observation", ""), str):
            raise UserError(f'steps[{index}] has an "observation" that is not text.')


def _is_number(value: Any) -> bool:
    # compared, as math.isfinite fails on an integer beyond the floats; False for nan
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
