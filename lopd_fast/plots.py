"""The curves of a run as one picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lopd_fast.errors import UserError
from lopd_fast.metrics import LOW_GAP

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STUDENT, _COMPOSER, _NEUTRAL, _SKIPPED = "#1f6fb4", "#d9660f", "#3d3d3d", "#b3261e"
_PHASES = ("#4c78a8", "#b8b0ac", "#f58518", "#e45756", "#72b7b2", "#54a24b", "#b279a2", "#9d755d")
_SMOOTH = ("beta", "bank_size", "peak_mib")  # no noise to average over
_MEASURED = ("teacher_gap", "teacher_reward", "reward_gap")
_NAMES = {"reverse_kl": "reverse KL", "forward_kl": "forward KL", "jsd": "JSD"}


@dataclass(frozen=True)
class _Panel:
    """One diagram: a title, and (metric, colour, label) of its curves."""

    title: str
    curves: tuple[tuple[str, str, str | None], ...]
    level: tuple[float, str] | None = None  # a dashed line to hold the curve against, and its name
    log: bool = False


def _panels(margin: float) -> list[_Panel]:
    student, composer, neutral = _STUDENT, _COMPOSER, _NEUTRAL
    both = (("student_mass", student, "student"), ("teacher_mass", composer, "teacher"))
    norms = (("student_grad_norm", student, "θ, student"), ("composer_grad_norm", composer, "φ, composer"))
    rewards = (("reward", student, "student"), ("teacher_reward", composer, "teacher, on some tasks"))
    return [
        _Panel("reward of the step's rollouts", rewards),
        _Panel("reward gap, teacher less student", (("reward_gap", composer, None),), (0.0, "equal")),
        _Panel(
            "teacher gap KL(z+ ‖ z−), nats a token",
            (("teacher_gap", composer, None),),
            (LOW_GAP, "warned of"),
        ),
        _Panel("divergence from the teacher, nats a token", (("kl", student, None),)),
        _Panel("privileged margin Δ, nats", (("delta", composer, None),), (margin, f"margin m = {margin:g}")),
        _Panel("dual variable β", (("beta", composer, None),)),
        _Panel("probability mass on the support", both),
        _Panel("surprise of the sampled tokens, nats", (("entropy", student, None),)),
        _Panel("mean square distance from the anchor", (("anchor", composer, None),)),
        _Panel("gradient norm before clipping", norms, log=True),
        _Panel("tokens of a response, mean", (("response_tokens", student, None),)),
        _Panel("experiences in the bank", (("bank_size", neutral, None),)),
        _Panel("seconds of a step, by phase", ()),
        _Panel("supervised tokens a second", (("tokens_per_second", student, None),)),
        _Panel("peak memory, MiB", (("peak_mib", neutral, None),)),
    ]


def plot_curves(metrics: list[dict[str, Any]], path: str | Path, *, margin: float, title: str) -> None:
    """Draw every metric over the steps into a PNG.

    metrics: one dictionary per step, as `read_metrics` gives them; None is a gap. Faint lines are single steps, full
    ones a moving mean. Dotted verticals mark where the divergence changes, crosses at the foot the skipped steps.

    Raises:
        UserError: there are no steps to draw.
    """
    from matplotlib.figure import Figure  # the object API: no global state, and PNG is drawn by Agg
    from matplotlib.ticker import MaxNLocator

    if not metrics:
        raise UserError("There are no metrics to plot: train for at least one step.")
    steps = _column(metrics, "step")
    changes = _changes(metrics)
    window = max(5, len(steps) // 15)
    if len(steps) < 2 * window:
        window = 1
    figure = Figure(figsize=(14, 15.5), dpi=100, layout="constrained")
    note = f"faint: single steps; full: mean of the last {window}" if window > 1 else ""
    figure.suptitle(f"{title}\n{note}" if note else title, fontsize=13)
    panels = list(zip(_panels(margin), figure.subplots(5, 3, sharex=True).flat, strict=True))
    for panel, axes in panels:
        for name, color, label in panel.curves:
            values = _column(metrics, name)
            if name in _MEASURED and np.isnan(values).mean() > 0.5:  # every so many steps
                known = np.isfinite(values)
                label = label if known.any() else None
                axes.plot(steps[known], values[known], color=color, marker="o", linewidth=1.2, label=label)
            else:
                restarts = [position for position, _ in changes] if name == "kl" else []
                _curve(axes, steps, values, color, label, 1 if name in _SMOOTH else window, restarts)
            if name == "kl":
                _name_changes(axes, steps, changes)
        if panel.curves:
            _decorate(axes, panel, metrics)
        else:
            _stack_phases(axes, steps, metrics)
        axes.set_title(panel.title, fontsize=11)
    _group_rewards(panels[0][1], steps, metrics, window)

    skipped = steps[[bool(values.get("skipped")) for values in metrics]]
    for panel, axes in panels:
        for position, _ in changes:
            axes.axvline(_between(steps, position), color=_NEUTRAL, linestyle=":", linewidth=1.2)
        if len(skipped):
            label = f"skipped steps, {len(skipped)}" if panel.log else None
            foot = np.full(len(skipped), 0.03)
            place = axes.get_xaxis_transform()
            axes.plot(skipped, foot, "x", color=_SKIPPED, markersize=6, transform=place, label=label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10], min_n_ticks=1))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            columns = 1 if panel.curves else 3
            axes.legend(fontsize=8, framealpha=0.7, edgecolor="none", loc="best", ncols=columns)
    # A few steps get room on both sides; one alone would else be ticked in fractions of a step.
    pad = max(0.5, 0.02 * (steps[-1] - steps[0]))
    panels[0][1].set_xlim(steps[0] - pad, steps[-1] + pad)
    for _, axes in panels[-3:]:
        axes.set_xlabel("step")
    figure.savefig(path, format="png")


def _decorate(axes: "Axes", panel: _Panel, metrics: Sequence[dict[str, Any]]) -> None:
    """The level, the scale, and a word where nothing was measured."""
    known = [np.isfinite(_column(metrics, name)) for name, _, _ in panel.curves]
    if not any(values.any() for values in known):
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color=_NEUTRAL, alpha=0.6)
        axes.set_yticks([])
    elif panel.level is not None:
        axes.axhline(panel.level[0], color=_NEUTRAL, linestyle="--", linewidth=1.2, label=panel.level[1])
    if panel.log and any((_column(metrics, name) > 0).any() for name, _, _ in panel.curves):
        axes.set_yscale("log", nonpositive="mask")
    else:
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 6))


def _stack_phases(axes: "Axes", steps: np.ndarray, metrics: Sequence[dict[str, Any]]) -> None:
    """Seconds of every phase, one upon the other, in the order that the step has them."""
    names = list(dict.fromkeys(name for values in metrics for name in values.get("phases") or {}))
    if names:
        seconds = [[(values.get("phases") or {}).get(name, 0.0) for values in metrics] for name in names]
        colors = [_PHASES[index % len(_PHASES)] for index in range(len(names))]
        edges = np.concatenate([steps - 0.5, steps[-1:] + 0.5])
        heights = np.repeat(
            np.array(seconds), 2, axis=1
        )  # flat over each step, so that one step alone is seen
        axes.stackplot(np.repeat(edges, 2)[1:-1], heights, labels=names, colors=colors, linewidth=0)
        axes.set_ylim(0, 1.4 * heights.sum(axis=0).max())  # room for the names


def _group_rewards(axes: "Axes", steps: np.ndarray, metrics: Sequence[dict[str, Any]], window: int) -> None:
    """The mean reward of each group of tasks, dashed."""
    names = sorted({name for values in metrics for name in values.get("group_rewards") or {}})
    for index, name in enumerate(names if len(names) > 1 else []):
        found = [{name: (values.get("group_rewards") or {}).get(name)} for values in metrics]
        means = _moving_mean(_column(found, name), window)
        axes.plot(steps, means, color=_PHASES[3 + index % 5], linestyle="--", linewidth=1.1, label=name)


def _name_changes(axes: "Axes", steps: np.ndarray, changes: Sequence[tuple[int, str]]) -> None:
    for position, name in changes:
        axes.annotate(
            f"{name} from here",
            (_between(steps, position), 0.98),
            xycoords=axes.get_xaxis_transform(),
            xytext=(3, 0),
            textcoords="offset points",
            rotation=90,
            ha="left",
            va="top",
            fontsize=9,
            color=_NEUTRAL,
        )


def _curve(
    axes: "Axes",
    steps: np.ndarray,
    values: np.ndarray,
    color: str,
    label: str | None,
    window: int,
    restarts: list[int],
) -> None:
    """Single steps, and over them the mean of the last `window`, which starts afresh at each of `restarts`."""
    if window == 1:
        axes.plot(steps, values, color=color, linewidth=1.8, marker=_marker(len(steps)), label=label)
        return
    axes.plot(steps, values, color=color, linewidth=0.8, alpha=0.35)
    for part_steps, part in zip(np.split(steps, restarts), np.split(values, restarts), strict=True):
        axes.plot(part_steps, _moving_mean(part, window), color=color, linewidth=2.0, label=label)
        label = None  # named once


def _moving_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the last `window` values, gaps left out; of fewer at the start."""
    known = np.isfinite(values)
    sums = np.cumsum(np.insert(np.where(known, values, 0.0), 0, 0.0))
    counts = np.cumsum(np.insert(known.astype(float), 0, 0.0))
    end = np.arange(1, len(values) + 1)
    start = np.maximum(end - window, 0)
    count = counts[end] - counts[start]
    return np.where(count > 0, (sums[end] - sums[start]) / np.maximum(count, 1.0), np.nan)


def _changes(metrics: Sequence[dict[str, Any]]) -> list[tuple[int, str]]:
    """(position of the first step, name) of each divergence after the first."""
    names = [str(values.get("divergence")) for values in metrics]
    return [
        (position, _NAMES.get(names[position], names[position]))
        for position in range(1, len(names))
        if names[position] != names[position - 1]
    ]


def _between(steps: np.ndarray, position: int) -> float:
    return float(steps[position - 1 : position + 1].mean())


def _column(metrics: Sequence[dict[str, Any]], name: str) -> np.ndarray:
    return np.array([np.nan if values.get(name) is None else values[name] for values in metrics], dtype=float)


def _marker(count: int) -> str:
    """Dots while there are few steps; a single one has no line to show it."""
    return "o" if count <= 20 else ""
