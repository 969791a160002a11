"""What each step reports, as JSON lines, and to whatever trackers a run has."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from lopd_fast.errors import UserError
from lopd_fast.trackers import Tracker

METRICS = "metrics.jsonl"
LOW_GAP = 0.1  # nats: below it a teacher hardly tells one experience from another


class MetricsLog:
    """Appends to `folder/metrics.jsonl` one JSON object per step, and hands its numbers to `trackers`.

    resume_step: the step of the checkpoint that the run goes on from; lines of later steps are dropped, so no step is
    ever in the file twice. None: a new run, and lines of an earlier attempt are dropped.
    """

    def __init__(
        self, folder: str | Path, resume_step: int | None = None, trackers: Sequence[Tracker] = ()
    ) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / METRICS
        self._last = -1 if resume_step is None else resume_step
        earlier = read_metrics(path) if path.exists() else []
        _replace(path, [line for line in earlier if line["step"] <= self._last])
        self._file = path.open("a", encoding="utf-8")
        self._trackers = trackers

    def write(self, values: Mapping[str, Any]) -> None:
        """Append one step's values, "step" among them; NaN and infinities become null, which JSON has.

        Raises:
            ValueError: "step" is not after the step before.
        """
        step = values["step"]
        if step <= self._last:
            raise ValueError(f"Metrics of step {step} come after those of step {self._last}.")
        self._file.write(_line(values))
        self._file.flush()
        self._last = step
        scalars = _scalars({name: value for name, value in values.items() if name != "step"})
        for tracker in self._trackers:
            tracker.log(scalars, step)

    def close(self) -> None:
        """Close the file and the trackers."""
        self._file.close()
        for tracker in self._trackers:
            tracker.close()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The steps of a metrics.jsonl, in order. A last line that a kill left unfinished is dropped.

    Raises:
        UserError: no such file, or a line before the last that is not a step.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"There are no metrics at {path}.")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    metrics = []
    for number, line in enumerate(lines, start=1):
        try:
            values = json.loads(line)
            if not isinstance(values["step"], int):
                raise TypeError
        except (ValueError, KeyError, TypeError):
            if number == len(lines):
                break
            raise UserError(
                f"Line {number} of {path} is not the metrics of a step: mend or delete it."
            ) from None
        metrics.append(values)
    return metrics


def _line(values: Mapping[str, Any]) -> str:
    return json.dumps({name: _finite(value) for name, value in values.items()}, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _scalars(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The finite numbers, those of an inner mapping under `its name/their name`."""
    scalars: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            scalars |= _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and math.isfinite(value):
            scalars[prefix + name] = value
    return scalars


def _replace(path: Path, metrics: list[dict[str, Any]]) -> None:
    """Rewrite the file in one step: a kill leaves the old one or the new one."""
    temporary = path.with_name(f"{path.name}.partial")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(_line(values) for values in metrics)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
