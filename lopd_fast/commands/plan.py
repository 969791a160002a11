"""`lopd-fast plan`: what a run needs, before anything loads."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lopd_fast.commands import user_errors

if TYPE_CHECKING:
    from rich.table import Table

    from lopd_fast.plan.make import Plan


@user_errors()
def run(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value, for example rollout.batch_size=4")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="a YAML file of sections; what it leaves out is the paper's")
    ] = None,
    gpu: Annotated[
        str, typer.Option(help="a GPU by name, such as h100-80gb; without it, the device of this machine")
    ] = "",
    model: Annotated[
        str, typer.Option(help="a model shape by name, such as qwen3-8b, in place of the folder model.path")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="print the plan as JSON")] = False,
) -> None:
    """Print peak memory by phase and part, what fits, and an estimated time; exit with 1 if the run does not fit."""
    import torch
    from rich.console import Console
    from rich.text import Text

    from lopd_fast.backbone import pick_device, pick_dtype
    from lopd_fast.config import load_config
    from lopd_fast.plan.devices import named_device, this_device
    from lopd_fast.plan.load import load_of
    from lopd_fast.plan.make import advice, make_plan
    from lopd_fast.plan.models import model_of, named_model

    settings = load_config(config, overrides or [])
    at = torch.device("cuda") if gpu else pick_device(settings.model.device)
    device = named_device(gpu) if gpu else this_device(at)
    shape = named_model(model) if model else model_of(settings.model)
    plan = make_plan(settings, load_of(settings), shape, device, pick_dtype(settings.model.dtype, at))
    if as_json:
        typer.echo(json.dumps(plan.as_dict(), indent=2))
    else:
        console = Console()
        console.print(_table(plan))
        console.print(Text(f"{_summary(plan)}\n{'This run fits.' if plan.fits else advice(plan)}"))
    raise typer.Exit(0 if plan.fits else 1)


def _table(plan: "Plan") -> "Table":
    from rich.table import Table

    from lopd_fast.plan.devices import GB

    names = next(iter(plan.phases.values())).parts
    parts = [x for x in names if max(phase.parts[x] for phase in plan.phases.values()) >= GB / 100]
    room = f"{plan.device.usable / GB:.1f} usable of {plan.device.bytes / GB:.1f}"
    table = Table("phase", title=f"Peak memory in GB on {plan.device.name} ({room})")
    for name in (*parts, "total"):
        table.add_column(name, justify="right")
    for name, phase in plan.phases.items():
        sizes = [f"{phase.parts[part] / GB:.2f}" if phase.parts[part] else "" for part in parts]
        total = f"{phase.peak / GB:.2f}"
        table.add_row(name, *sizes, f"[red]{total}[/red]" if phase.peak > plan.device.usable else total)
    return table


def _summary(plan: "Plan") -> str:
    from lopd_fast.plan.devices import BANDWIDTH_SHARE, FLOPS_SHARE, GB

    load = plan.load
    update = sum(seconds for name, seconds in plan.seconds.items() if name not in ("prefill", "decode"))
    said = (
        f"Peak {plan.peak / GB:.1f} GB with rollouts of {load.tokens} tokens, {load.sampled} sampled at a time, and "
        f"{load.micro_batches} micro-batches of {load.rollouts}.\n"
        f"What fits, one at a time: rollouts of {plan.longest_rollout} tokens; micro-batches of "
        f"{plan.largest_micro_batch} tokens with the experiences of {load.rollouts} rollouts."
    )
    if plan.device.cuda:
        said += (
            f"\nEstimate, not measured, of a step whose every rollout is that long: update {update:.0f} s, rollout "
            f"{sum(plan.seconds.values()) - update:.0f} s, at {FLOPS_SHARE:.0%} of the data sheet's FLOP/s and "
            f"{BANDWIDTH_SHARE:.0%} of its bandwidth."
        )
    return said
