"""The curves of a run as one picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lopd_fast.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STUDENT, _COMPOSER, _NEUTRAL, _SKIPPED = "#1f6fb4", "#d9660f", "#3d3d3d", "#b3261e"
_NAMES = {"reverse_kl": "reverse KL", "forward_kl": "forward KL", "jsd": "JSD"}


def plot_curves(metrics: list[dict[str, Any]], path: str | Path, *, margin: float, title: str) -> None:
    """Draw reward, KL, Delta against the margin, beta, gradient norms and masses over the steps into a PNG.

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
    figure = Figure(figsize=(13, 7), dpi=110, layout="constrained")
    figure.suptitle(title, fontsize=14, fontweight="bold")
    reward, kl, delta, beta, norms, masses = panels = list(figure.subplots(2, 3, sharex=True).flat)

    def draw(axes: "Axes", name: str, color: str, label: str | None = None) -> None:
        restarts = [position for position, _ in changes] if name == "kl" else []
        _curve(axes, steps, _column(metrics, name), color, label, window, restarts)

    draw(reward, "reward", _STUDENT, f"mean of the last {window} steps" if window > 1 else None)
    reward.set_title("reward, mean of the step's rollouts")
    draw(kl, "kl", _STUDENT)
    kl.set_title("divergence from the teacher, nats per token")
    draw(delta, "delta", _COMPOSER)
    delta.axhline(margin, color=_NEUTRAL, linestyle="--", linewidth=1.2, label=f"margin m = {margin:g}")
    delta.axhline(0.0, color=_NEUTRAL, linewidth=0.6, alpha=0.5)
    delta.set_title("privileged margin Δ, nats")
    beta.plot(steps, _column(metrics, "beta"), color=_COMPOSER, linewidth=1.8, marker=_marker(len(steps)))
    beta.set_title("dual variable β")
    draw(norms, "student_grad_norm", _STUDENT, "θ, student")
    draw(norms, "composer_grad_norm", _COMPOSER, "φ, composer")
    norms.set_title("gradient norm before clipping")
    if any((_column(metrics, name) > 0).any() for name in ("student_grad_norm", "composer_grad_norm")):
        norms.set_yscale("log", nonpositive="mask")
    draw(masses, "student_mass", _STUDENT, "student")
    draw(masses, "teacher_mass", _COMPOSER, "teacher")
    masses.set_title("probability mass on the support")

    skipped = steps[[bool(values.get("skipped")) for values in metrics]]
    for axes in panels:
        for position, _ in changes:
            axes.axvline(_between(steps, position), color=_NEUTRAL, linestyle=":", linewidth=1.2)
        if len(skipped):
            label = f"skipped steps, {len(skipped)}" if axes is norms else None
            foot = np.full(len(skipped), 0.03)
            place = axes.get_xaxis_transform()
            axes.plot(skipped, foot, "x", color=_SKIPPED, markersize=6, transform=place, label=label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10], min_n_ticks=1))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_fontsize(11)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=9)
    # A few steps get room on both sides; one alone would else be ticked in fractions of a step.
    pad = max(0.5, 0.02 * (steps[-1] - steps[0]))
    reward.set_xlim(steps[0] - pad, steps[-1] + pad)
    for axes in (beta, norms, masses):
        axes.set_xlabel("step")
    for position, name in changes:
        kl.annotate(
            f"{name} from here",
            (_between(steps, position), 0.98),
            xycoords=kl.get_xaxis_transform(),
            xytext=(3, 0),
            textcoords="offset points",
            rotation=90,
            ha="left",
            va="top",
            fontsize=9,
            color=_NEUTRAL,
        )
    figure.savefig(path, format="png")


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
