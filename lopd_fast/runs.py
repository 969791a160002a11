"""A run from nothing to a trained student, in stages that can be stopped and resumed: explore, cold start, distil.

Folder of a run: config.json, trajectories.jsonl and bank/ (after explore), cold_start/metrics.jsonl, metrics.jsonl,
tensorboard/, checkpoints/; at the end curves.png, report.html and student/.
"""

import dataclasses
import fcntl
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from lopd_fast.bank_files import write_bank
from lopd_fast.batch import Rollout, StepMetrics
from lopd_fast.build import Parts
from lopd_fast.checkpoint import (
    Checkpoint,
    latest_good,
    optimizer_tensors,
    restore_optimizer,
)
from lopd_fast.checkpoint_writer import CheckpointWriter
from lopd_fast.cold_start import ColdStart, ColdStartMetrics
from lopd_fast.config import Config, save_config, to_dict
from lopd_fast.envs.base import Demonstrator, Task
from lopd_fast.errors import UserError
from lopd_fast.explore import explore, keep, replay
from lopd_fast.interrupt import StopRequest
from lopd_fast.metrics import MetricsLog, read_metrics
from lopd_fast.plots import plot_curves
from lopd_fast.report import write_report
from lopd_fast.rollout.episodes import Progress
from lopd_fast.rollout.sampling import Sampling
from lopd_fast.sharding import gathered
from lopd_fast.trackers import start_trackers
from lopd_fast.trainer import Trainer
from lopd_fast.trajectories import load_trajectories, save_trajectories

StepHook = Callable[[ColdStartMetrics | StepMetrics], None]


class Stopped(Exception):
    """The run was asked to stop; it has saved a checkpoint."""


@dataclass
class Run:
    """Drives the stages over `parts`; `say` hears what a person should know.

    Of several processes all go through the stages together; the first one writes the files.
    """

    parts: Parts
    say: Callable[[str], None] = print
    pool: dict[str, Rollout] = field(default_factory=dict)  # by experience id

    def __post_init__(self) -> None:
        self.config: Config = self.parts.config
        self.world = self.parts.world
        self.out = Path(self.config.train.out)
        self.checkpoints = self.out / "checkpoints"
        keep = self.config.train.keep_checkpoints
        self.writer = CheckpointWriter(self.checkpoints, keep=keep, say=self.say)

    # --- folder -----------------------------------------------------------------------------------------------

    def open(self, resume: bool) -> bool:
        """Prepare the folder. Returns whether there is a checkpoint to go on from.

        Raises:
            UserError: the folder holds a run that was not asked to be resumed, or one of another configuration, or no
                run where one is to be resumed, or a run that is in progress.
        """
        return self.world.gather(self._open(resume) if self.world.first else None)[0]

    def _open(self, resume: bool) -> bool:
        saved = self.out / "config.json"
        if resume and not saved.is_file():
            raise UserError(
                f"There is no run to go on with in {self.out} (no config.json); check train.out or --out."
            )
        before = _saved_config(saved)
        found = latest_good(self.checkpoints) is not None
        if not resume and found:
            raise UserError(
                f"{self.out} holds an earlier run; go on with it by --resume, or choose another folder (train.out=...)."
            )
        if resume and found:
            _check_same(before, to_dict(self.config), self.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self._lock()
        save_config(self.config, saved)
        return resume and found

    def _lock(self) -> None:
        """Hold the folder for this process until it ends."""
        self._held = (self.out / ".lock").open("w")
        try:
            fcntl.lockf(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise UserError(
                f"Another process is at work in {self.out}; wait for it, or choose another folder."
            ) from None

    # --- explore ----------------------------------------------------------------------------------------------

    def seed(self, tasks: Sequence[Task]) -> None:
        """Put the environment's own solutions of `tasks` into bank and pool, marked as seeds."""
        environment, tokenizer = self.parts.environment, self.parts.renderer.tokenizer
        if not isinstance(environment, Demonstrator):
            raise UserError(
                f"explore.seeds={len(tasks)}, but the environment {environment.name} has no solutions to show."
            )
        end = self.parts.renderer.turn_end
        rollouts = []
        for task in tasks:
            action = environment.solution(task)
            ids = [*tokenizer(action, add_special_tokens=False).input_ids, end]
            rollouts.append(replay(environment, task, action, ids))
        wrong = [rollout for rollout in rollouts if rollout.reward < 1.0]
        if wrong:
            raise UserError(
                f"The environment's solution of task {wrong[0].task.id} has reward {wrong[0].reward}, not 1."
            )
        keep(rollouts, self.parts.bank, self.pool, "seed")

    def explore(self, tasks: Sequence[Task], progress: Progress | None = None) -> int:
        """Attempt `tasks` in rounds, later ones seeing earlier successes; returns how many successes were kept."""
        rounds = self.config.explore.rounds
        sampling, seed = Sampling.of(self.config.rollout), self.config.train.seed
        found = 0
        with self.parts.engine.base(self.parts.backbone) as base:
            for number in range(rounds):
                good = explore(
                    base,
                    self.parts.engine,
                    self.parts.environment,
                    tasks[number::rounds],
                    self.parts.bank,
                    self.pool,
                    retrieval=self.config.retrieval,
                    shots=self.config.explore.shots,
                    sampling=sampling,
                    seed=seed * 1_000_003 + number,
                    per_group=self.config.explore.per_group,
                    progress=progress,
                )
                found += len(good)
        if not self.pool and (self.config.cold_start.steps or not len(self.parts.bank)):
            raise UserError(
                f"None of {len(tasks)} attempts succeeded, so there is no trajectory to learn from; give easier tasks, "
                "seed demonstrations (explore.seeds), or a bank (retrieval.bank) with cold_start.steps=0."
            )
        if self.world.first:
            save_trajectories(self.pool.values(), self.out / "trajectories.jsonl")
            self.parts.bank.save(self.out / "bank")
        return found

    # --- cold start -------------------------------------------------------------------------------------------

    def cold_start(self, hook: StepHook | None = None) -> ColdStart:
        """Train phi_0, from the latest checkpoint where there is one; ends with a checkpoint and the anchor frozen."""
        stage = ColdStart(
            self.parts.backbone,
            self.parts.composer,
            self.parts.renderer,
            self.parts.bank,
            list(self.pool.values()),
            self.config.cold_start,
            self.config.retrieval,
            seed=self.config.train.seed,
            micro_batch_tokens=self.config.train.micro_batch_tokens,
            say=self.say,
            world=self.world,
        )
        checkpoint = self._latest()
        if checkpoint is not None and checkpoint.state["stage"] == "cold_start":
            self.parts.composer.load(checkpoint.tensors["composer"])
            restore_optimizer(stage.optimizer, checkpoint.tensors["optimizer"])
            stage.step = checkpoint.state["stage_step"]
        with (
            self._log("cold_start", stage.step) as log,
            StopRequest(notice=self.world.first) as stop,
            self.writer,
        ):
            while stage.step < self.config.cold_start.steps:
                metrics = stage.run_step()
                if log is not None:
                    log.write(dataclasses.asdict(metrics))
                if hook is not None:
                    hook(metrics)
                last = stage.step == self.config.cold_start.steps
                due = last or stage.step % self.config.train.checkpoint_every == 0
                due = self.world.any(stop.requested) or due
                if due:
                    self._save_cold_start(stage)
                if due and self.world.any(stop.requested):  # which may have come while it was saved
                    break
        if self.world.any(stop.requested):  # in the last step too: the next stage would not know of it
            self.writer.finish()
            raise Stopped
        self.parts.composer.freeze_anchor()
        return stage

    # --- distil -----------------------------------------------------------------------------------------------

    def distil(self, tasks: Sequence[Task], hook: StepHook | None = None) -> Trainer:
        """Run LOPD steps from the latest checkpoint of this stage, or from its start."""
        trainer = Trainer(self.parts, tasks, say=self.say)
        checkpoint = self._latest()
        if checkpoint is not None and checkpoint.state["stage"] == "distil":
            self.parts.composer.load(checkpoint.tensors["composer"])
            self.parts.student.load(checkpoint.tensors["student"])
            trainer.load(checkpoint.tensors, checkpoint.state["trainer"])
        train = self.config.train
        with (
            self._log("", trainer.step) as log,
            StopRequest(notice=self.world.first) as stop,
            self.writer,
        ):
            while trainer.step < train.steps:
                metrics = trainer.run_step()
                if log is not None:
                    log.write(dataclasses.asdict(metrics))
                if hook is not None:
                    hook(metrics)
                last = trainer.step == train.steps
                due = last or trainer.step % train.checkpoint_every == 0
                due = self.world.any(stop.requested) or due
                if due:
                    self._save_trainer(trainer)
                if due and self.world.any(stop.requested):  # which may have come while it was saved
                    break
        self.writer.finish()
        if self.world.any(stop.requested):
            raise Stopped
        if trainer.skipped == train.steps:
            raise UserError(
                f"All {train.steps} steps were skipped, so the student has learned nothing; the lines above say why."
            )
        return trainer

    def finish(self, title: str = "LOPD") -> Path:
        """Write the grown bank, curves and report, and the student as a plain model folder; returns that folder."""
        if self.world.first:
            self.parts.bank.save(self.out / "bank")
            objective = self.config.objective
            curves = read_metrics(self.out / "metrics.jsonl")
            plot_curves(curves, self.out / "curves.png", margin=objective.margin, title=title)
            write_report(
                self.out / "report.html", curves, self.out / "curves.png", to_dict(self.config), title=title
            )
        folder = self.out / "student"
        self.parts.student.save(folder, self.parts.renderer.tokenizer, write=self.world.first)
        return folder

    def restore(self) -> str:
        """Bring bank and trajectories back from the folder; returns the stage that the latest checkpoint is in."""
        self.pool = {}
        checkpoint = self._latest()
        assert checkpoint is not None
        before = checkpoint.state.get("processes", 1)
        if before != self.world.size:
            self.say(
                f"warning: this run was saved by {before} process{'es' * (before > 1)} and goes on in "
                f"{self.world.size}: sums are taken in another order, so it is the same run but for rounding (and, "
                "between one with a launcher and one without, but for the draws of its rollouts)."
            )
        rollouts = load_trajectories(self.out / "trajectories.jsonl")
        saved = checkpoint.path / "bank"
        bank = type(self.parts.bank).load(
            saved if saved.is_dir() else self.out / "bank", self.parts.bank.encoder
        )
        self.parts.bank = bank
        keep(rollouts, bank, self.pool)
        return checkpoint.state["stage"]

    def _latest(self) -> Checkpoint | None:
        """The checkpoint to go on from; none of the processes reads while the first still writes."""
        self.world.wait()
        return latest_good(self.checkpoints)

    def _log(self, stage: str, step: int) -> AbstractContextManager[MetricsLog | None]:
        """The metrics of the subfolder `stage` after `step`, None but for the first process."""
        if not self.world.first:
            return nullcontext()
        return MetricsLog(self.out / stage, step or None, start_trackers(self.config, stage, step))

    def _save_cold_start(self, stage: ColdStart) -> None:
        tensors = {"composer": self.parts.composer.state(), "optimizer": optimizer_tensors(stage.optimizer)}
        state = {"stage": "cold_start", "stage_step": stage.step}
        self._save(stage.step, tensors, state)

    def _save_trainer(self, trainer: Trainer) -> None:
        self.parts.composer.pool_anchors(self.world)
        tensors = {
            "composer": self.parts.composer.state(),
            "student": self.parts.student.state(),
            **trainer.tensors(),
        }
        state = {"stage": "distil", "stage_step": trainer.step, "trainer": trainer.state()}
        self._save(self.config.cold_start.steps + trainer.step, tensors, state)

    def _save(
        self,
        step: int,
        tensors: Mapping[str, Mapping[str, Tensor]],
        state: dict[str, Any],
    ) -> None:
        tensors = {group: gathered(entries, self.world.first) for group, entries in tensors.items()}
        if not self.world.first:
            return
        if self.world.size > 1:
            state = state | {"processes": self.world.size}
        bank = self.parts.bank.snapshot()
        self.writer.save(step, tensors, state, extra=lambda folder: write_bank(folder / "bank", bank))


def _saved_config(path: Path) -> dict[str, Any]:
    """The configuration of an earlier run, {} where there is none."""
    if not path.is_file():
        return {}
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        if not {"model", "train"} <= saved.keys():
            raise ValueError
    except (ValueError, AttributeError):
        raise UserError(
            f"{path} is not the configuration of a run; choose another folder, or delete it."
        ) from None
    return saved


def _check_same(saved: dict[str, Any], now: dict[str, Any], out: Path) -> None:
    """Refuse to resume with another configuration; how long to train, how often to save, what is
    sharded and what memory is saved by may."""
    free = {
        ("train", "steps"),
        ("train", "checkpoint_every"),
        ("train", "keep_checkpoints"),
        ("train", "out"),
        ("train", "trackers"),
        ("train", "wandb_project"),
        ("train", "micro_batch_tokens"),
        ("rollout", "batch_size"),
        ("model", "shard"),
        ("model", "gradient_checkpointing"),
        ("model", "activation_offload"),
    }
    for section, values in now.items():
        for key, value in values.items():
            before = saved.get(section, {}).get(key)
            if section != "monitor" and (section, key) not in free and before != value:
                raise UserError(
                    f"{out} was started with {section}.{key}={before!r}, now it is {value!r}; resume with the same "
                    "configuration or choose another folder."
                )
