"""`lopd-fast train`: a run from a configuration file."""

import json
from pathlib import Path
from typing import Annotated

import typer

from lopd_fast.commands import user_errors


@user_errors()
def run(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value, for example optim.lr=1e-5")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="a YAML file of sections; what it leaves out is the paper's")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on from the run's last checkpoint")] = False,
) -> None:
    """Train a student with LOPD: explore, cold start, distil, evaluate."""
    from rich.console import Console

    from lopd_fast.build import build
    from lopd_fast.config import load_config
    from lopd_fast.console import Stages
    from lopd_fast.liger import uses_liger
    from lopd_fast.pipeline import Pipeline
    from lopd_fast.plan.make import refuse_too_large
    from lopd_fast.processes import leave, start
    from lopd_fast.runs import Stopped

    settings = load_config(config, overrides or [])
    world = start(settings.model.device)
    if world.size == 1 or not (settings.model.shard or settings.student.mode == "full"):
        refuse_too_large(settings)  # the plan is that of a process that holds everything
    stages = Stages(None if world.first else Console(quiet=True))
    parts = build(settings, world)
    if uses_liger(parts.backbone.model):
        stages.say(
            "RMSNorm, rotary embedding and SwiGLU run on Liger's kernels (model.liger_kernels=false: on torch's)."
        )
    pipeline = Pipeline(parts, stages)
    try:
        if not pipeline.open(resume):
            pipeline.evaluate_student("before")
            pipeline.explore()
        pipeline.learn()
        pipeline.evaluate_student("after")
    except Stopped:
        stages.say(
            f"Stopped and saved. Go on with the same command and --resume (run folder: {settings.train.out})."
        )
        leave()
        raise typer.Exit(130) from None
    student = pipeline.finish("LOPD")
    leave()
    if not world.first:
        return
    before, after = pipeline.rate("student_before_greedy"), pipeline.rate("student_after_greedy")
    stages.say(
        f"Held-out pass rate, greedy: {before:.2f} before, {after:.2f} after. The student is in {student}."
    )
    summary = {
        "pass_rate_before": before,
        "pass_rate_after": after,
        "seconds": pipeline.results.values["seconds"],
    }
    (Path(settings.train.out) / "summary.json").write_text(
        json.dumps(summary, indent=2) + "\n", encoding="utf-8"
    )
