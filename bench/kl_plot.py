"""The picture of `kl_throughput`: time and memory, as bars for one size and as curves over the rows for a sweep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS, FLOOR = ("#1f6fb4", "#5aa9e6", "#0b3c66"), "#2b2b2b"
OTHERS = ("#d9660f", "#a8a8a8", "#8c5aa8", "#3f9e6b", "#c23b5c", "#8a6d3b", "#6f7f8f")


def plot(results: list[dict[str, Any]], path: str) -> None:
    """Draw the results of one run into a PNG. Providers without numbers are left out; with no numbers, no picture."""
    from matplotlib.figure import Figure  # the object API: no global state, and PNG is drawn by Agg

    rows = [row for row in results if row["ms_median"] is not None]
    if not rows:
        print("no picture: nothing was measured")
        return
    counts = sorted({row["rows"] for row in rows})
    names = list(dict.fromkeys(row["name"] for row in rows))
    colors = _colors(names)
    figure = Figure(
        figsize=(13, 1.6 + 0.42 * len(names) if len(counts) == 1 else 6), dpi=120, layout="constrained"
    )
    left, right = figure.subplots(1, 2, sharey=len(counts) == 1)
    if len(counts) == 1:
        _bars(left, rows, colors, "ratio_to_floor", "{:.2f}x")
        _bars(right, rows, colors, "peak_extra_mib", "{:,.0f} MiB")
        left.invert_yaxis()
    else:
        _curves(left, rows, colors, "ms_median")
        _curves(right, rows, colors, "peak_extra_mib")
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    unit = "times the dense GEMM floor" if len(counts) == 1 else "ms, median"
    left.set_title(f"forward and backward, {unit}")
    right.set_title("peak memory beyond inputs and gradients, MiB")
    first = rows[0]
    size = f"{counts[0]:,} rows, " if len(counts) == 1 else ""
    figure.suptitle(
        f"{size}vocabulary {first['vocab']:,}, hidden {first['hidden']:,}, {first['dtype']}, {first['hardware']}",
        fontweight="bold",
    )
    figure.savefig(path)


def _colors(names: list[str]) -> dict[str, str]:
    ours = [name for name in names if name.startswith("lopd_fast")]
    others = [name for name in names if name not in ours and "floor" not in name]
    colors = dict.fromkeys(names, FLOOR)
    for kind, palette in ((ours, OURS), (others, OTHERS)):
        colors |= {name: palette[i % len(palette)] for i, name in enumerate(kind)}
    return colors


def _bars(axes: Axes, rows: list[dict[str, Any]], colors: dict[str, str], field: str, form: str) -> None:
    values = [row[field] or 0.0 for row in rows]
    bars = axes.barh([row["name"] for row in rows], values, color=[colors[row["name"]] for row in rows])
    axes.bar_label(bars, [form.format(value) for value in values], padding=4)
    axes.set_xlim(0, 1.18 * max(*values, 1e-3))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def _curves(axes: Axes, rows: list[dict[str, Any]], colors: dict[str, str], field: str) -> None:
    for name, color in colors.items():
        points = sorted((row["rows"], row[field]) for row in rows if row["name"] == name and row[field])
        if points:
            style = "--" if color == FLOOR else "-"
            width = 2.4 if name.startswith("lopd_fast") else 1.4
            axes.plot(*zip(*points, strict=True), style, color=color, linewidth=width, marker="o", label=name)
    counts = sorted({row["rows"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(counts, [f"{count:,}" for count in counts], minor=False)
    axes.set_xlabel("rows (supervised tokens)")
    axes.grid(alpha=0.3, which="both")
    axes.spines[["top", "right"]].set_visible(False)
