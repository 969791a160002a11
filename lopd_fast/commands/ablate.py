"""`lopd-fast ablate`: what each part of the method is worth on the demo's task."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lopd_fast.commands import alone, user_errors

if TYPE_CHECKING:
    from lopd_fast.config import Config
    from lopd_fast.console import Stages
    from lopd_fast.pipeline import Pipeline

VARIANTS: dict[str, list[str]] = {
    "method": [],
    "frozen composer": ["objective.freeze_composer=true"],
    "m = 0": ["objective.margin=0"],
    "no latents": ["objective.use_latents=false"],
    "shuffled retrieval": ["retrieval.shuffle=true", "retrieval.within_group=false"],
}
OWN_START = {"shuffled retrieval"}  # its composer is trained otherwise; the others go on from one cold start


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

    Variants that differ in the distillation alone go on from one cold start. A run that is there already is not run
    again, so a stopped ablation goes on with the same command.
    """
    import json

    from rich.table import Table

    from lopd_fast.console import Stages
    from lopd_fast.errors import UserError

    alone("ablate")
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
            stages.say("", title=f"\n{name}, seed {seed}")
            folder = out / f"{name.replace(' ', '-')}-{seed}"
            words = [f"train.seed={seed}", *(overrides or [])]
            if name not in OWN_START and not folder.is_dir():
                start = out / f"start-{seed}"
                _cold_start(start, words, stages)
                _branch(start, folder, [*words, *VARIANTS[name]])
            rows[name].append(_variant(folder, [*words, *VARIANTS[name]], stages))
    table = Table(title=f"Held-out pass rate of the student, mean over seeds {seeds}")
    for column in ("variant", "before", "after", "KL at the end", "Delta at the end"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for name, results in rows.items():
        means = {key: sum(result[key] for result in results) / len(results) for key in results[0]}
        table.add_row(name, *(f"{means[key]:.3f}" for key in ("before", "after", "kl", "delta")))
    stages.console.print(table)
    (out / "ablation.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


def _config(folder: Path, words: list[str]) -> "Config":
    """The demo's settings for a run in `folder`, with `words` laid over them."""
    from lopd_fast.config import load_config
    from lopd_fast.demo.show import SETTINGS
    from lopd_fast.demo.smollm import smollm_folder

    return load_config(SETTINGS, [f"model.path={smollm_folder()}", f"train.out={folder}", *words])


@contextmanager
def _opened(folder: Path, words: list[str], stages: "Stages") -> "Iterator[Pipeline]":
    """The pipeline of `folder`, explored already; a request to stop ends the command."""
    from lopd_fast.build import build
    from lopd_fast.pipeline import Pipeline
    from lopd_fast.runs import Stopped

    pipeline = Pipeline(build(_config(folder, words)), stages)
    try:
        if not pipeline.open(resume=(folder / "config.json").is_file()):
            pipeline.evaluate_student("before")
            pipeline.explore()
        yield pipeline
    except Stopped:
        stages.say("Stopped and saved. Go on with the same command.")
        raise typer.Exit(130) from None


def _cold_start(folder: Path, words: list[str], stages: "Stages") -> None:
    """The start that variants share, or what an earlier call left of it brought to its end."""
    with _opened(folder, words, stages) as pipeline:
        pipeline.cold_start()


def _branch(start: Path, folder: Path, words: list[str]) -> None:
    """A copy of `start` that goes on as the run `folder`, whose configuration is another."""
    import shutil

    from lopd_fast.config import save_config

    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(start, partial)
    save_config(_config(folder, words), partial / "config.json")
    partial.replace(folder)


def _variant(folder: Path, words: list[str], stages: "Stages") -> dict[str, float]:
    """Train one variant, or read what an earlier call left, and return its numbers."""
    from lopd_fast.metrics import read_metrics

    with _opened(folder, words, stages) as pipeline:
        pipeline.learn()
        pipeline.evaluate_student("after")
        pipeline.finish(folder.name)
    last = [line for line in read_metrics(folder / "metrics.jsonl") if not line["skipped"]][-4:]
    return {
        "before": pipeline.rate("student_before_greedy"),
        "after": pipeline.rate("student_after_greedy"),
        "kl": sum(line["kl"] for line in last) / len(last),
        "delta": sum(line["delta"] for line in last) / len(last),
    }
