"""`lopd-fast bank`: build an experience bank from rollouts, ask it, and describe it."""

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from lopd_fast.bank import ExperienceBank
from lopd_fast.bank_files import HEADER, read_bank
from lopd_fast.commands import user_errors
from lopd_fast.errors import UserError
from lopd_fast.experience import OBSERVATION_LIMIT, read_experiences
from lopd_fast.retriever import SentenceEncoder

app = typer.Typer(no_args_is_help=True, help="The experience bank: build it, search it, describe it.")

Folder = Annotated[Path, typer.Argument(help="The folder of a bank.", metavar="DIR")]
Encoder = Annotated[
    str,
    typer.Option(help="Folder of a sentence-transformers model; by default the packaged all-MiniLM-L6-v2."),
]
Device = Annotated[str | None, typer.Option(help="Where the encoder runs, e.g. cpu or cuda.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Let the encoder's folder run its own Python code.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]


@app.command()
@user_errors()
def build(
    rollouts: Annotated[
        Path, typer.Argument(help="JSON lines with task, reward, and trace or steps.", metavar="INPUT.jsonl")
    ],
    out: Annotated[Path, typer.Option(help="The folder to save the bank in.")],
    encoder: Encoder = "",
    query_prompt: Annotated[
        str | None, typer.Option(help="Text before each query; by default what the encoder publishes.")
    ] = None,
    document_prompt: Annotated[
        str | None, typer.Option(help="Text before each document; by default what the encoder publishes.")
    ] = None,
    min_reward: Annotated[float, typer.Option(help="Rollouts with less are not admitted.")] = 1.0,
    observation_limit: Annotated[
        int, typer.Option(min=0, help="Characters kept of each observation in `steps`.")
    ] = OBSERVATION_LIMIT,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts embedded at once.")] = 32,
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the bank that is in --out.")
    ] = False,
) -> None:
    """Build a bank from the successful rollouts of a JSON-lines file."""
    if (out / HEADER).exists() and not overwrite:
        raise UserError(f"{out} already holds a bank: give another folder, or --overwrite to replace it.")
    size = rollouts.stat().st_size if rollouts.is_file() else 0
    if rollouts.is_file() and not size:
        raise UserError(f"{rollouts} is empty: give a JSON-lines file with a rollout on each line.")
    with _progress() as progress:
        reading = progress.add_task("reading", total=size)
        experiences = list(
            read_experiences(
                rollouts,
                observation_limit=observation_limit,
                on_bytes=lambda count: progress.advance(reading, count),
            )
        )
        _quiet_weight_loading()
        opened = SentenceEncoder(
            encoder,
            query_prompt=query_prompt,
            document_prompt=document_prompt,
            batch_size=batch_size,
            device=device,
            trust_remote_code=trust_remote_code,
        )
        bank = ExperienceBank(opened, min_reward=min_reward)
        good = sum(experience.reward >= min_reward for experience in experiences)
        embedding = progress.add_task("embedding", total=good)
        report = bank.add(experiences, progress=lambda count: progress.advance(embedding, count))
        progress.update(embedding, completed=good)  # those merged were not embedded
    if not len(bank):
        raise UserError(
            f"none of the {len(experiences)} rollouts in {rollouts} has a reward of {min_reward:g} or more, so there "
            "is no bank to build: lower --min-reward or give successful rollouts."
        )
    bank.save(out)
    typer.echo(
        f"{len(experiences)} rollouts read: {report.added} admitted, {report.below_reward} dropped (reward below "
        f"{min_reward:g}), {report.merged} merged. Saved {len(bank)} x {opened.dim} to {out} "
        f"({decimal(_size_on_disk(out))})."
    )


@app.command()
@user_errors()
def search(
    folder: Folder,
    task: Annotated[str, typer.Argument(help="The task to find experiences for.")],
    neighbours: Annotated[int, typer.Option("-j", "--neighbours", min=1, help="How many to return.")] = 3,
    group: Annotated[
        list[str] | None, typer.Option(help="Only experiences of this group; may be given several times.")
    ] = None,
    no_self: Annotated[
        bool, typer.Option("--no-self", help="Leave out experiences of this very task.")
    ] = False,
    encoder: Annotated[str, typer.Option(help="Where the bank's encoder is now, if its folder moved.")] = "",
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Show the experiences that a task would be given."""
    if not task.strip():
        raise UserError("the task is empty: give the text of a task.")
    for text in (task, *(group or ())):
        try:
            text.encode()
        except UnicodeEncodeError:  # bytes of the command line that were no UTF-8
            raise UserError(f"{text!r} is not valid UTF-8: give the task and its groups in UTF-8.") from None
    _quiet_weight_loading()
    bank = ExperienceBank.load(folder, encoder, device=device, trust_remote_code=trust_remote_code)
    known = sorted({entry.group for entry in bank.experiences})
    for name in group or ():
        if name not in known:
            raise UserError(f"the bank has no group {name!r}; its groups are: {', '.join(map(repr, known))}.")
    groups = [set(group)] if group else None
    hits = bank.search([task], neighbours, allow_self=not no_self, groups=groups)[0]
    if as_json:
        found = [{"score": hit.score, **asdict(hit.experience)} for hit in hits]
        typer.echo(json.dumps(found, indent=2, ensure_ascii=False))
        return
    table = Table(
        *(Column(name, no_wrap=True) for name in ("score", "id", "group", "quality")), "task", "trace"
    )
    for hit in hits:
        entry = hit.experience
        cells = [f"{hit.score:.4f}", entry.id, entry.group, f"{entry.quality:g}", entry.task, entry.trace]
        table.add_row(*(Text(_head(cell)) for cell in cells))
    Console().print(table if hits else "no experience is allowed by these restrictions")


@app.command()
@user_errors()
def stats(folder: Folder, as_json: AsJson = False) -> None:
    """Describe a bank: what is in it, how long, how good, and which encoder it belongs to."""
    stored = read_bank(folder)
    entries = stored.experiences
    facts: dict[str, Any] = {
        "count": len(entries),
        "groups": _counts([entry.group for entry in entries]),
        "sources": _counts([entry.source for entry in entries]),
        "quality": _quantiles([entry.quality for entry in entries]),
        "task_characters": _quantiles([len(entry.task) for entry in entries]),
        "trace_characters": _quantiles([len(entry.trace) for entry in entries]),
        "min_reward": stored.header["min_reward"],
        "embedding_dim": stored.header["dim"],
        "encoder": stored.header["encoder"],
        "bytes_on_disk": _size_on_disk(folder),
    }
    if as_json:
        typer.echo(json.dumps(facts, indent=2, ensure_ascii=False))
        return
    table = Table(show_header=False)
    for name, value in facts.items():
        if name == "bytes_on_disk":
            name, value = "size on disk", decimal(value)
        elif isinstance(value, dict):
            value = "\n".join(f"{_head(key) or '(none)'}: {_short(item)}" for key, item in value.items())
        table.add_row(name.replace("_", " "), Text(str(value)))
    Console().print(table)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )


def _quiet_weight_loading() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()  # it would be drawn over ours


def _head(text: str, limit: int = 100) -> str:
    """The start of a text on one line, without the control characters that a model may have written."""
    line = " ".join("".join(character if character.isprintable() else " " for character in text).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _counts(labels: list[str]) -> dict[str, int]:
    return dict(Counter(labels).most_common())


def _quantiles(values: list[float] | list[int]) -> dict[str, float]:
    names = ("min", "25%", "50%", "75%", "max")
    if not values:
        return {}
    return dict(zip(names, np.quantile(values, [0, 0.25, 0.5, 0.75, 1]).tolist(), strict=True))


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else repr(value) if value == "" else str(value)


def _size_on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
