"""`lopd-fast ablate`: what each part of the method is worth on the demo's task."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lopd_fast.commands import user_errors

if TYPE_CHECKING:
    from lopd_fast.console import Stages

VARIANTS: dict[str, list[str]] = {
    "method": [],
    "frozen composer": ["objective.freeze_composer=true"],
    "m = 0": ["objective.margin=0"],
    "no latents": ["objective.use_latents=false"],
    "shuffled retrieval": ["retrieval.shuffle=true", "retrieval.within_group=false"],
}


@user_errors()
def run(
    out: Annotated[Path, typer.Option(help="folder of the runs, one for each variant and seed")] = Path(
        "runs/ablate"
    ),
    seeds: Annotated[str, typer.Option(help="seeds, separated by commas")] = "0",
    variants: Annotated[str, typer.Option(help="variants, separated by commas; all by default")] = "",
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value laid over the demo's settings")
    ] = None,
) -> None:
    """Train the demo's task with parts of the method switched off, and print one table.

    A run that is there already is not run again, so a stopped ablation goes on with the same command.
    """
    import json

    from rich.table import Table

    from lopd_fast.console import Stages
    from lopd_fast.errors import UserError

    names = [name.strip() for name in variants.split(",")] if variants else list(VARIANTS)
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        raise UserError(f"There is no variant '{unknown[0]}'; the variants are {', '.join(VARIANTS)}.")
    if not all(word.strip().isdigit() for word in seeds.split(",")):
        raise UserError(f"--seeds is '{seeds}'; give whole numbers separated by commas, such as 0,1,2.")
    stages = Stages()
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for seed in (int(word) for word in seeds.split(",")):
        for name in names:
            stages.say(f"\n[bold]{name}, seed {seed}[/bold]")
            folder = out / f"{name.replace(' ', '-')}-{seed}"
            rows[name].append(_variant(folder, [*(overrides or []), *VARIANTS[name]], seed, stages))
    table = Table(title=f"Held-out pass rate of the student, mean over seeds {seeds}")
    for column in ("variant", "before", "after", "KL at the end", "Delta at the end"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for name, results in rows.items():
        means = {key: sum(result[key] for result in results) / len(results) for key in results[0]}
        table.add_row(name, *(f"{means[key]:.3f}" for key in ("before", "after", "kl", "delta")))
    stages.console.print(table)
    (out / "ablation.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


def _variant(folder: Path, overrides: list[str], seed: int, stages: "Stages") -> dict[str, float]:
    """Train one variant, or read what an earlier call left, and return its numbers."""
    from lopd_fast.build import build
    from lopd_fast.config import load_config
    from lopd_fast.demo.show import SETTINGS
    from lopd_fast.demo.smollm import smollm_folder
    from lopd_fast.metrics import read_metrics
    from lopd_fast.pipeline import Pipeline
    from lopd_fast.runs import Stopped

    words = [f"model.path={smollm_folder()}", f"train.out={folder}", f"train.seed={seed}", *overrides]
    pipeline = Pipeline(build(load_config(SETTINGS, words)), stages)
    try:
        if not pipeline.open(resume=True):
            pipeline.evaluate_student("before")
            pipeline.explore()
        pipeline.learn()
        pipeline.evaluate_student("after")
    except Stopped:
        stages.say("Stopped and saved. Go on with the same command.")
        raise typer.Exit(130) from None
    pipeline.finish(folder.name)
    last = [line for line in read_metrics(folder / "metrics.jsonl") if not line["skipped"]][-4:]
    return {
        "before": pipeline.rate("student_before_greedy"),
        "after": pipeline.rate("student_after_greedy"),
        "kl": sum(line["kl"] for line in last) / len(last),
        "delta": sum(line["delta"] for line in last) / len(last),
    }
