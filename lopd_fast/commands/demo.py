"""`lopd-fast demo`: watch a small model learn, on a CPU, in minutes."""

from pathlib import Path
from typing import Annotated

import typer

from lopd_fast.commands import alone, user_errors


@user_errors()
def run(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value over the demo's settings")
    ] = None,
    out: Annotated[Path, typer.Option(help="the run's folder")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="of tasks, initial weights and sampling")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="go on from the last checkpoint")] = False,
) -> None:
    """Teach SmolLM2-135M the house conventions of companies from its own experience, end to end."""
    from lopd_fast.demo.show import demo

    alone("demo")
    demo(out, seed=seed, resume=resume, overrides=overrides or [])
