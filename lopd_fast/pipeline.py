"""From nothing to a trained and evaluated student: explore, cold start, distil, with held-out pass rates in between.

Every evaluation is kept in the run's folder as it is made, so a resumed run goes on where it was stopped.
"""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lopd_fast.batch import Rollout, StepMetrics
from lopd_fast.build import Parts
from lopd_fast.cold_start import ColdStartMetrics
from lopd_fast.console import Stages
from lopd_fast.envs.base import Task, check_tasks
from lopd_fast.errors import UserError
from lopd_fast.evaluation import pass_rate, teacher_gap, teacher_rollouts
from lopd_fast.explore import successful
from lopd_fast.memory_advice import memory_told, sampling_advice
from lopd_fast.retrieval import retrieve
from lopd_fast.rollout.sampling import GREEDY, Sampling
from lopd_fast.runs import Run

WARM = Sampling(0.7, 0.95, 20)


class Results:
    """Named results on disk; `once` computes what is not there yet."""

    def __init__(self, path: Path, write: bool = True) -> None:
        self.path, self.write = path, write
        self.values: dict[str, Any] = {}

    def load(self) -> None:
        """Read the results of the run that is resumed."""
        if self.path.is_file():
            try:
                self.values = json.loads(self.path.read_text(encoding="utf-8"))
            except ValueError:
                raise UserError(
                    f"{self.path} is not JSON: delete it, and its evaluations are made again."
                ) from None

    def forget(self, prefix: str) -> None:
        """Drop the results whose names start so; they were of an earlier student."""
        stale = [name for name in self.values if name.startswith(prefix)]
        for name in stale:
            del self.values[name]
        if stale:
            self._save()

    def once(self, name: str, compute: Callable[[], Any]) -> Any:
        """The result `name`, computed and saved if it is not known."""
        if name not in self.values:
            self.put(name, compute())
        return self.values[name]

    def put(self, name: str, value: Any) -> None:
        """Save a result."""
        self.values[name] = value
        self._save()

    def _save(self) -> None:
        if not self.write:
            return
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.values, indent=2) + "\n", encoding="utf-8")
        temporary.replace(self.path)


class Pipeline:
    """The stages of one run over its parts, with progress on a console."""

    def __init__(self, parts: Parts, stages: Stages) -> None:
        self.parts, self.stages = parts, stages
        self.config = parts.config
        self.run = Run(parts, say=stages.say)
        self.results = Results(self.run.out / "results.json", write=parts.world.first)
        self.stage = "explore"
        environment, train = parts.environment, self.config.train
        self.heldout = environment.tasks("heldout", self.config.environment.heldout_tasks, train.seed)
        self.train_tasks = environment.tasks("train", self.config.environment.train_tasks, train.seed)
        check_tasks(self.heldout, "heldout", environment.name)
        check_tasks(self.train_tasks, "train", environment.name)

    def open(self, resume: bool) -> bool:
        """Prepare the run's folder; True if it goes on from a checkpoint."""
        going_on = self.run.open(resume)
        if going_on:
            self.results.load()
            self.stage = self.run.restore()
        return going_on

    # --- stages -----------------------------------------------------------------------------------------------

    def explore(self) -> None:
        """Seeds, then the base's own successes, into the bank."""
        started = time.perf_counter()
        explore = self.config.explore
        tasks = self.parts.environment.tasks(
            "train", explore.seeds + explore.tasks, self.config.train.seed + 1
        )
        if explore.seeds:
            self.run.seed(tasks[: explore.seeds])
        with (
            self.stages.stage("explore: the base's own successes", explore.tasks) as stage,
            memory_told(lambda: self._sampling_advice("explore")),
        ):
            found = self.run.explore(tasks[explore.seeds :], progress=stage.advance)
        self.results.put("seed_demonstrations", explore.seeds)
        self.results.put("own_successes", found)
        self._took("explore", started)

    def cold_start(self) -> None:
        """phi_0."""
        started = time.perf_counter()
        with self.stages.stage(
            "cold start: the composer learns to pass experience on", self.config.cold_start.steps
        ) as stage:

            def hook(metrics: ColdStartMetrics | StepMetrics) -> None:
                assert isinstance(metrics, ColdStartMetrics)
                stage.advance(metrics.step - stage.done, f"nll {metrics.nll:.3f}")

            self.run.cold_start(hook)
        self._took("cold_start", started)

    def distil(self) -> None:
        """The LOPD steps."""
        started = time.perf_counter()
        with self.stages.stage(
            "distil: the student learns from its own rollouts", self.config.train.steps
        ) as stage:

            def hook(metrics: ColdStartMetrics | StepMetrics) -> None:
                assert isinstance(metrics, StepMetrics)
                self.results.forget("student_after")
                stage.advance(
                    metrics.step - stage.done,
                    f"reward {metrics.reward:.2f}  kl {metrics.kl:.3f}  "
                    f"delta {metrics.delta:+.3f}  beta {metrics.beta:.2f}",
                )

            self.run.distil(self.train_tasks, hook)
        self._took("distil", started)

    def learn(self) -> None:
        """Cold start and distillation, from wherever the run is."""
        if self.stage != "distil":
            self.cold_start()
        self.distil()

    def finish(self, title: str) -> Path:
        """Curves and the plain student folder."""
        return self.run.finish(title)

    # --- evaluations ------------------------------------------------------------------------------------------

    def evaluate_student(self, when: str) -> None:
        """Held-out pass rates of the student, greedy and at T 0.7, and what it answered."""
        with self.parts.engine.policy(self.parts.student) as model:
            for name, sampling in (("greedy", GREEDY), ("t07", WARM)):
                self._evaluate(
                    f"student_{when}_{name}",
                    lambda progress, sampling=sampling: self.parts.engine.rollouts(
                        model, self.parts.environment, self.heldout, sampling, seed=1, progress=progress
                    ),
                )

    def evaluate_teacher(self, name: str, groups: Sequence[set[str]] | None) -> None:
        """Held-out pass rates of the teacher with experiences of `groups[b]` (None: as retrieved) for task b."""
        experiences = retrieve(self.parts.bank, self.heldout, self.config.retrieval, seed=1, groups=groups)
        for suffix, sampling in (("greedy", GREEDY), ("t07", WARM)):
            self._evaluate(
                f"teacher_{name}_{suffix}",
                lambda progress, sampling=sampling: teacher_rollouts(
                    self.parts.backbone,
                    self.parts.composer,
                    self.parts.engine,
                    self.parts.environment,
                    self.heldout,
                    experiences,
                    sampling,
                    seed=1,
                    progress=progress,
                ),
            )

    def evaluate_gap(self, positive: Sequence[set[str]], negative: Sequence[set[str]]) -> float:
        """KL between the teachers with positive and with negative experience, on trajectories of the pool, in nats."""

        def compute() -> float:
            rollouts = successful(list(self.run.pool.values()))[: len(self.heldout)]
            by_group = {
                task.group: (good, bad)
                for task, good, bad in zip(self.heldout, positive, negative, strict=True)
            }
            rollouts = [rollout for rollout in rollouts if rollout.task.group in by_group]
            tasks = [rollout.task for rollout in rollouts]
            found = [
                retrieve(
                    self.parts.bank,
                    tasks,
                    self.config.retrieval,
                    groups=[by_group[t.group][side] for t in tasks],
                )
                for side in (0, 1)
            ]
            parts = self.parts
            return teacher_gap(parts.backbone, parts.composer, parts.renderer, rollouts, found[0], found[1])

        return self.results.once("kl_pos_neg", compute)

    def _evaluate(self, name: str, roll: Callable[[Callable[[int], None]], list[Rollout]]) -> None:
        if name in self.results.values:
            return
        started = time.perf_counter()
        with (
            self.stages.stage(f"evaluate {name.replace('_', ' ')}", len(self.heldout)) as stage,
            memory_told(lambda: self._sampling_advice("an evaluation")),
        ):
            rollouts = roll(stage.advance)
        groups = sorted({task.group for task in self.heldout})
        self.results.put(
            name,
            {
                "pass_rate": pass_rate(rollouts),
                "by_group": {group: pass_rate(rollouts, group) for group in groups},
                "actions": [rollout.action for rollout in rollouts],
                "rewards": [rollout.reward for rollout in rollouts],
            },
        )
        self._took("evaluate", started)

    def _sampling_advice(self, where: str) -> UserError:
        return sampling_advice(where, self.parts.backbone, self.config.rollout.batch_size)

    def rate(self, name: str) -> float:
        """The pass rate of evaluation `name`."""
        return self.results.values[name]["pass_rate"]

    def _took(self, stage: str, started: float) -> None:
        seconds = self.results.values.get("seconds", {})
        seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - started
        self.results.put("seconds", seconds)


def other_groups(heldout: Sequence[Task], groups: set[str]) -> list[set[str]]:
    """For every task, the groups that are not its own."""
    return [groups - {task.group} for task in heldout]
