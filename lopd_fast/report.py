"""A run as one HTML page that needs nothing beside it."""

import base64
import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lopd_fast.errors import UserError

ROWS = {  # metric -> what it is called
    "reward": "reward",
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
    "peak_mib": "peak memory, MiB",
}
STYLE = """
body {font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #222}
img {max-width: 100%} table {border-collapse: collapse; margin: 1em 0}
td, th {padding: .25em .9em; border-bottom: 1px solid #ddd; text-align: left}
td + td, th + th {text-align: right; font-variant-numeric: tabular-nums} .wide td {text-align: left}
"""


def write_report(
    path: str | Path,
    metrics: Sequence[Mapping[str, Any]],
    curves: str | Path,
    settings: Mapping[str, Any],
    *,
    title: str,
) -> None:
    """Write `path`: the picture `curves`, each metric at the start and at the end, seconds by phase, and the settings.

    metrics: one mapping per step, as `read_metrics` gives them; start and end are means over a tenth of the steps.

    Raises:
        UserError: there are no steps to report.
    """
    if not metrics:
        raise UserError("There are no metrics to report: train for at least one step.")
    share = max(1, len(metrics) // 10)
    first, last = metrics[:share], metrics[-share:]
    values = [
        (name, _number(_mean(first, key)), _number(_mean(last, key)))
        for key, name in ROWS.items()
        if any(line.get(key) is not None for line in metrics)
    ]
    phases = sorted({name for line in metrics for name in line.get("phases") or {}})
    spent = {name: sum((line.get("phases") or {}).get(name, 0.0) for line in metrics) for name in phases}
    whole = sum(spent.values()) or 1.0
    times = [
        (name, f"{seconds / len(metrics):.2f}", f"{seconds / whole:.0%}") for name, seconds in spent.items()
    ]
    skipped = sum(bool(line.get("skipped")) for line in metrics)
    seconds = sum(line.get("seconds") or 0.0 for line in metrics)
    picture = base64.b64encode(Path(curves).read_bytes()).decode()
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        f"<p>{len(metrics)} steps, {skipped} of them skipped; {seconds:.0f} s.</p>",
        f'<img alt="curves of the run" src="data:image/png;base64,{picture}">',
        _table(("", f"first {share}", f"last {share}"), values),
        "<h2>Time</h2>" + _table(("phase", "seconds a step", "share"), times) if times else "",
        "<h2>Settings</h2>" + _table(("setting", "value"), _flat(settings), "wide"),
    ]
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style><body>{''.join(parts)}</body></html>\n"
    )
    Path(path).write_text(page, encoding="utf-8")


def _mean(lines: Sequence[Mapping[str, Any]], key: str) -> float:
    known = [line[key] for line in lines if line.get(key) is not None]
    return sum(known) / len(known) if known else math.nan


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.4g}"


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
