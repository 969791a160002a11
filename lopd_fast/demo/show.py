"""The demo from start to end: what it runs, what it prints, what it leaves in its folder."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from lopd_fast.build import build
from lopd_fast.config import load_config
from lopd_fast.console import Stages
from lopd_fast.demo.smollm import smollm_folder
from lopd_fast.envs.staff_database import StaffDatabase
from lopd_fast.pipeline import Pipeline
from lopd_fast.runs import Stopped

SETTINGS = Path(__file__).with_name("demo.yaml")
SAMPLES = 5


def demo(out: Path, *, seed: int, resume: bool, overrides: Sequence[str] = ()) -> None:
    """Run the demo into `out`; the last line printed is the next command to try."""
    started = time.perf_counter()
    stages = Stages()
    stages.say(": SmolLM2-135M learns which table of a company's database to trust.", title="lopd-fast demo")
    with stages.stage("prepare the model", 1) as stage:
        model = smollm_folder()
        stage.advance()
    words = [f"model.path={model}", f"train.out={out}", f"train.seed={seed}", *overrides]
    settings = load_config(SETTINGS, words)
    out = Path(settings.train.out)
    pipeline = Pipeline(build(settings), stages)
    try:
        if not pipeline.open(resume):
            pipeline.evaluate_student("before")
            pipeline.explore()
        if pipeline.stage != "distil":
            pipeline.cold_start()
            right, wrong = conventions(pipeline)
            pipeline.evaluate_teacher("right", right)
            pipeline.evaluate_teacher("wrong", wrong)
            pipeline.evaluate_gap(right, wrong)
        pipeline.distil()
        pipeline.evaluate_student("after")
    except Stopped:
        stages.say(f"Stopped and saved in {out}. Go on with the same command and --resume.")
        raise typer.Exit(130) from None
    student = pipeline.finish(f"Demo, seed {seed}")
    summary = summarise(pipeline, time.perf_counter() - started)
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    show(pipeline, stages, summary)
    stages.say(
        f"Report: {out / 'report.html'}   Curves: {out / 'curves.png'}   Numbers: {out / 'summary.json'}   "
        f"Student: {student}"
    )
    stages.say(
        f'Next, search the bank that it grew:  lopd-fast bank search {out / "bank"} "{pipeline.heldout[0].text}"'
    )


def conventions(pipeline: Pipeline) -> tuple[list[set[str]], list[set[str]]]:
    """For every held-out task, its own company; and the companies of which another table is the live one."""
    environment = pipeline.parts.environment
    assert isinstance(environment, StaffDatabase)
    live = environment.conventions
    right = [{task.group} for task in pipeline.heldout]
    wrong = [{name for name, table in live.items() if table != live[task.group]} for task in pipeline.heldout]
    return right, wrong


def summarise(pipeline: Pipeline, seconds: float) -> dict[str, Any]:
    """The numbers of the demo, as `summary.json` holds them."""
    values, rate = pipeline.results.values, pipeline.rate
    return {
        "pass_rate_before": rate("student_before_greedy"),
        "pass_rate_after": rate("student_after_greedy"),
        "pass_rate_teacher_right": rate("teacher_right_greedy"),
        "pass_rate_teacher_wrong": rate("teacher_wrong_greedy"),
        "pass_rate_before_t07": rate("student_before_t07"),
        "pass_rate_after_t07": rate("student_after_t07"),
        "pass_rate_teacher_right_t07": rate("teacher_right_t07"),
        "pass_rate_teacher_wrong_t07": rate("teacher_wrong_t07"),
        "pass_rate_after_by_company": values["student_after_greedy"]["by_group"],
        "heldout_tasks": len(pipeline.heldout),
        "seconds": round(seconds, 1),
        "seconds_by_stage": {name: round(value, 1) for name, value in values["seconds"].items()},
        "kl_pos_neg": values["kl_pos_neg"],
        "seed_demonstrations": values["seed_demonstrations"],
        "own_successes": values["own_successes"],
        "bank_size": len(pipeline.parts.bank),
        "seed": pipeline.config.train.seed,
        "divergence": schedule_words(pipeline),
    }


def schedule_words(pipeline: Pipeline) -> str:
    """Which divergence the steps used, in words."""
    loss, steps = pipeline.config.loss, pipeline.config.train.steps
    early = round(loss.first_share * steps)
    return f"{loss.first_divergence} for {early} steps, then {loss.divergence}" if early else loss.divergence


def show(pipeline: Pipeline, stages: Stages, summary: dict[str, Any]) -> None:
    """The table of pass rates, and sample tasks before and after."""
    values = pipeline.results.values
    table = Table(
        title=f"Held-out pass rate, {summary['heldout_tasks']} tasks with people and values never trained on"
    )
    for column in ("", "greedy", "T 0.7", *(sorted(summary["pass_rate_after_by_company"]))):
        table.add_column(column, justify="left" if column == "" else "right")
    rows = {
        "base = student before": "student_before",
        "teacher, right company's experience": "teacher_right",
        "teacher, another convention's experience": "teacher_wrong",
        "student after": "student_after",
    }
    for title, name in rows.items():
        by_group = values[f"{name}_greedy"]["by_group"]
        rates = [values[f"{name}_greedy"]["pass_rate"], values[f"{name}_t07"]["pass_rate"]]
        rates += [by_group[group] for group in sorted(by_group)]
        table.add_row(title, *(f"{rate:.2f}" for rate in rates))
    stages.console.print(table)
    stages.say(
        f"KL between the two teachers: {summary['kl_pos_neg']:.2f} nats a token. Divergence: {summary['divergence']}. "
        f"Bank: {summary['seed_demonstrations']} seed demonstrations, {summary['own_successes']} own successes, "
        f"{summary['bank_size']} entries in the end."
    )
    for task, before, after, passed in list(
        zip(
            pipeline.heldout,
            values["student_before_greedy"]["actions"],
            values["student_after_greedy"]["actions"],
            values["student_after_greedy"]["rewards"],
            strict=True,
        )
    )[:SAMPLES]:
        stages.console.print(f"\n{task.text}", markup=False, highlight=False)
        stages.console.print(f"  before: {' '.join(before.split())[:100]}", markup=False, highlight=False)
        verdict = "right" if passed else "wrong"
        stages.console.print(
            f"  after:  {' '.join(after.split())[:100]}  ({verdict})", markup=False, highlight=False
        )
