"""A run as one HTML page that needs nothing beside it."""

import base64
import html
import math
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from lopd_fast import __version__
from lopd_fast.errors import UserError

ROWS = {  # metric -> what it is called
    "reward": "reward",
    "teacher_reward": "reward of the teacher, on some tasks",
    "reward_gap": "teacher's reward less the student's",
    "teacher_gap": "KL between right and other experiences, nats per token",
    "kl": "divergence from the teacher, nats per token",
    "delta": "privileged margin Δ, nats",
    "beta": "dual variable β",
    "anchor": "distance from the anchor",
    "student_mass": "student's mass on the support",
    "teacher_mass": "teacher's mass on the support",
    "entropy": "surprise of the sampled tokens, nats",
    "response_tokens": "tokens of a response",
    "student_grad_norm": "gradient norm of the student",
    "composer_grad_norm": "gradient norm of the composer",
    "seconds": "seconds a step",
    "tokens_per_second": "supervised tokens a second",
    "bank_size": "experiences in the bank",
    "peak_mib": "peak memory, MiB",
}
STYLE = """
body {font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #222}
img {max-width: 100%} table {border-collapse: collapse; margin: 1em 0}
td, th {padding: .25em .9em; border-bottom: 1px solid #ddd; text-align: left}
td + td, th + th {text-align: right; font-variant-numeric: tabular-nums} .wide :is(td, th) {text-align: left}
.wide td {overflow-wrap: anywhere}
"""
PACKAGES = ("torch", "transformers", "peft", "accelerate", "sentence-transformers", "triton", "vllm")


def write_report(
    path: str | Path,
    metrics: Sequence[Mapping[str, Any]],
    curves: str | Path,
    settings: Mapping[str, Any],
    *,
    title: str,
) -> None:
    """Write `path`: the picture `curves`, each metric at the start and at the end, what was said, seconds by phase,
    settings and versions.

    metrics: one mapping per step, as `read_metrics` gives them; start and end are means over a tenth of the steps, or
    over what was measured first and last.

    Raises:
        UserError: there are no steps to report.
    """
    if not metrics:
        raise UserError("There are no metrics to report: train for at least one step.")
    share = max(1, len(metrics) // 10)
    known = {key: [line for line in metrics if line.get(key) is not None] for key in ROWS}
    values = [
        (
            name,
            _number(_mean(metrics[:share], key), lines[0][key]),
            _number(_mean(metrics[-share:], key), lines[-1][key]),
        )
        for key, name in ROWS.items()
        if (lines := known[key])
    ]
    phases = dict.fromkeys(name for line in metrics for name in line.get("phases") or {})
    spent = {name: sum((line.get("phases") or {}).get(name, 0.0) for line in metrics) for name in phases}
    whole = sum(spent.values()) or 1.0
    times = [
        (name, f"{seconds / len(metrics):.2f}", f"{seconds / whole:.0%}") for name, seconds in spent.items()
    ]
    skipped = sum(bool(line.get("skipped")) for line in metrics)
    seconds = sum(line.get("seconds") or 0.0 for line in metrics)
    said = [(str(line["step"]), text) for line in metrics for text in line.get("messages") or ()]
    picture = base64.b64encode(Path(curves).read_bytes()).decode()
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        f"<p>{len(metrics)} steps, {skipped} of them skipped; {seconds:.0f} s.</p>",
        f'<img alt="curves of the run" src="data:image/png;base64,{picture}">',
        _table(("", f"first {share}", f"last {share}"), values),
        "<h2>Said during the run</h2>"
        + (_table(("step", "message"), said, "wide") if said else "<p>Nothing.</p>"),
        "<h2>Time</h2>" + _table(("phase", "seconds a step", "share"), times) if times else "",
        "<h2>Settings</h2>" + _table(("setting", "value"), _flat(settings), "wide"),
        "<h2>Versions</h2>" + _table(("package", "version"), versions(), "wide"),
    ]
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style><body>{''.join(parts)}</body></html>\n"
    )
    Path(path).write_text(page, encoding="utf-8")


def _mean(lines: Sequence[Mapping[str, Any]], key: str) -> float:
    known = [line[key] for line in lines if line.get(key) is not None]
    return sum(known) / len(known) if known else math.nan


def _number(mean: float, otherwise: float) -> str:
    """The mean, or, of what was not measured in these steps, the nearest reading."""
    return f"{otherwise if math.isnan(mean) else mean:.4g}"


def versions() -> list[tuple[str, str]]:
    """What the run was made with: (name, version) of this package, Python, the system and PACKAGES that are there."""
    found = [
        ("lopd-fast", __version__),
        ("Python", platform.python_version()),
        ("system", platform.platform()),
    ]
    for name in PACKAGES:
        try:
            found.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    return found


def _flat(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for key, value in tree.items():
        rows += (
            _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(prefix + key, str(value))]
        )
    return rows


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return f'<table class="{kind}">{line(head, "th")}{"".join(line(row, "td") for row in rows)}</table>'
