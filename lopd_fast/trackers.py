"""Where a run reports to beside its own metrics.jsonl, through accelerate's trackers: TensorBoard and W&B."""

import importlib.util
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from lopd_fast.config import Config, to_dict
from lopd_fast.errors import UserError

WANDB_ID = "wandb_id"  # file in the run's folder: a resumed run goes on under the id in it


class Tracker(Protocol):
    """Takes the numbers of a step."""

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Report finite numbers by name."""
        ...

    def close(self) -> None:
        """Write out what is buffered."""
        ...


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers whose package is missing, before a run starts.

    Raises:
        UserError: a package is not installed.
    """
    for name in names:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # a mere folder of that name, such as W&B leaves behind
            raise UserError(
                f"train.trackers names {name}, which is not installed here; run: pip install {name}, or leave it out "
                "(metrics.jsonl and report.html need neither)."
            )


def start_trackers(config: Config, stage: str = "", steps_done: int = 0) -> list[Tracker]:
    """The trackers of `train.trackers` for one stage of the run, whose first `steps_done` steps they have already.

    `stage` is a subfolder of the run's folder, "" for the run itself; W&B has the names of its metrics behind it.

    Raises:
        UserError: W&B does not start, for want of a login or of a network.
    """
    from accelerate import PartialState

    PartialState()  # accelerate's trackers ask it which process they are in
    out = Path(config.train.out)
    started: list[Tracker] = []
    if "tensorboard" in config.train.trackers:
        started.append(_TensorBoard(out / stage, steps_done))
    if "wandb" in config.train.trackers:
        started.append(_Wandb(config, out, f"{stage}/" if stage else ""))
    return started


class _TensorBoard:
    def __init__(self, folder: Path, steps_done: int) -> None:
        from accelerate.tracking import TensorBoardTracker

        # With purge_step TensorBoard hides what an earlier attempt logged from that step on.
        self._tracker = TensorBoardTracker("tensorboard", folder, purge_step=steps_done + 1)
        self._tracker.start()

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self._tracker.log(dict(scalars), step=step)

    def close(self) -> None:
        self._tracker.finish()


class _Wandb:
    """W&B drops what is logged under an earlier step than its last, so the step is a number like the others."""

    def __init__(self, config: Config, out: Path, prefix: str) -> None:
        from accelerate.tracking import WandBTracker

        self._prefix = prefix
        options = {"id": _wandb_id(out), "resume": "allow", "name": out.name, "dir": str(out)}
        self._tracker = WandBTracker(config.train.wandb_project, **options)
        try:
            self._tracker.start()
        except Exception as error:  # of many kinds: no login, no network, a server that refuses
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"W&B does not start ({reason}); run 'wandb login', or set WANDB_MODE=offline, or leave it out of "
                "train.trackers."
            ) from error
        self._tracker.tracker.define_metric("step")
        self._tracker.tracker.define_metric("*", step_metric="step")
        self._tracker.store_init_configuration(to_dict(config))

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        named: dict[str, Any] = {self._prefix + name: value for name, value in scalars.items()}
        self._tracker.log(named | {"step": step})

    def close(self) -> None:
        self._tracker.finish()


def _wandb_id(out: Path) -> str:
    """The run's id at W&B, made at its first start."""
    path = out / WANDB_ID
    if not path.is_file():
        out.mkdir(parents=True, exist_ok=True)
        path.write_text(secrets.token_hex(6), encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()
