"""The metrics file is valid JSON line by line and has each step once, whatever was killed; the picture shows it all."""

import base64
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lopd_fast.errors import UserError
from lopd_fast.metrics import MetricsLog, read_metrics
from lopd_fast.plots import _changes, _moving_mean, plot_curves
from lopd_fast.report import write_report


def log_steps(folder: Path, first: int, last: int, resume_step: int | None = None, note: str = "a") -> None:
    with MetricsLog(folder, resume_step) as log:
        for step in range(first, last + 1):
            log.write({"step": step, "kl": step / 3, "note": note})


def strict_lines(path: Path) -> list[dict[str, Any]]:
    """Each line parsed as JSON proper, which has no NaN."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_each_step_is_readable_as_soon_as_it_is_written(tmp_path: Path):
    path = tmp_path / "run" / "metrics.jsonl"
    with MetricsLog(path.parent) as log:
        for step in (1, 2, 5):
            log.write({"step": step, "kl": 0.1 + 0.2, "divergence": "jsd", "skipped": step == 2})
            assert strict_lines(path)[-1] == {
                "step": step,
                "kl": 0.1 + 0.2,
                "divergence": "jsd",
                "skipped": step == 2,
            }
    assert read_metrics(path) == strict_lines(path)


def test_nan_and_infinity_are_null(tmp_path: Path):
    with MetricsLog(tmp_path) as log:
        log.write({"step": 1, "loss": math.nan, "kl": math.inf, "delta": -math.inf, "beta": 0.0})
    assert strict_lines(tmp_path / "metrics.jsonl") == [
        {"step": 1, "loss": None, "kl": None, "delta": None, "beta": 0.0}
    ]
    log_steps(tmp_path, 2, 2, resume_step=1)
    assert [line["step"] for line in strict_lines(tmp_path / "metrics.jsonl")] == [1, 2]


def test_resume_drops_the_steps_after_the_checkpoint(tmp_path: Path):
    log_steps(tmp_path, 1, 7)
    log_steps(tmp_path, 5, 8, resume_step=4, note="b")
    notes = {line["step"]: line["note"] for line in strict_lines(tmp_path / "metrics.jsonl")}
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == len(notes) == 8
    assert notes == dict.fromkeys(range(1, 5), "a") | dict.fromkeys(range(5, 9), "b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl"]


def test_a_new_run_starts_with_an_empty_file(tmp_path: Path):
    log_steps(tmp_path, 1, 3)
    log_steps(tmp_path, 1, 2, note="b")
    assert [(line["step"], line["note"]) for line in read_metrics(tmp_path / "metrics.jsonl")] == [
        (1, "b"),
        (2, "b"),
    ]


def test_a_step_twice_is_refused(tmp_path: Path):
    log_steps(tmp_path, 1, 3)
    with MetricsLog(tmp_path, resume_step=3) as log:
        with pytest.raises(ValueError, match="step 3 come after those of step 3"):
            log.write({"step": 3})
        log.write({"step": 4})
        with pytest.raises(ValueError, match="step 2 come after those of step 4"):
            log.write({"step": 2})
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_line_torn_at_any_byte_is_dropped(tmp_path: Path):
    log_steps(tmp_path, 1, 3)
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    start = whole.rindex(b"\n", 0, -1) + 1
    for end in range(start, len(whole)):
        path.write_bytes(whole[:end])
        steps = [line["step"] for line in read_metrics(path)]
        assert steps == ([1, 2, 3] if end == len(whole) - 1 else [1, 2]), whole[start:end]
    path.write_bytes(whole[: start + 9])
    log_steps(tmp_path, 3, 4, resume_step=2)
    assert [line["step"] for line in strict_lines(path)] == [1, 2, 3, 4]
    path.write_bytes(whole[:-1])  # the line is whole and its newline is not there
    log_steps(tmp_path, 4, 4, resume_step=3)
    assert [line["step"] for line in strict_lines(path)] == [1, 2, 3, 4]


@pytest.mark.parametrize("bad", ["{", "[1]", '{"kl": 1}', '{"step": "2"}'])
def test_a_bad_line_in_the_middle_is_named(bad: str, tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{bad}\n{{"step": 3}}\n')
    with pytest.raises(UserError, match="Line 2 of .*metrics.jsonl is not the metrics of a step"):
        read_metrics(path)
    with pytest.raises(UserError, match="no metrics at"):
        read_metrics(tmp_path / "absent.jsonl")


def steps_of_a_run(count: int) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "reward": step / count,
            "kl": 1.0 / step,
            "delta": None if step == 3 else 0.01 * step,
            "beta": 0.1,
            "student_grad_norm": 0.5 if step != 2 else 0.0,
            "composer_grad_norm": 0.01 * step,
            "student_mass": 0.9,
            "teacher_mass": 0.95,
            "teacher_gap": 0.1 * step,
            "reward_gap": 0.5 if step % 4 == 1 else None,
            "teacher_reward": 0.75 if step % 4 == 1 else None,
            "entropy": 1.5 / step,
            "anchor": 0.001 * step,
            "response_tokens": 20.0 + step,
            "bank_size": 3 * step,
            "tokens_per_second": 50.0 + step,
            "peak_mib": 700.0,
            "phases": {"rollout": 2.0 + step, "backward": 1.0},
            "group_rewards": {"g0": 0.0, "g1": step / count},
            "messages": ["warning: a <low> gap"] if step == 2 else [],
            "divergence": "forward_kl" if step <= count // 3 else "reverse_kl",
            "skipped": step == 3,
        }
        for step in range(1, count + 1)
    ]


def drawn(
    metrics: list[dict[str, Any]], path: Path, monkeypatch: pytest.MonkeyPatch, margin: float = 0.05
) -> Any:
    """The figure that `plot_curves` saved."""
    from matplotlib.figure import Figure

    figures = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k)))
    plot_curves(metrics, path, margin=margin, title="a run")
    return figures[0]


@pytest.mark.parametrize("count", [1, 9, 60])
def test_the_picture_shows_every_curve_and_mark(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    metrics = steps_of_a_run(count)
    figure = drawn(metrics, tmp_path / "curves.png", monkeypatch)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert figure.get_suptitle().splitlines()[0] == "a run"
    panels = {axes.get_title(): axes for axes in figure.axes}
    curves = [np.asarray(line.get_ydata(), dtype=float) for axes in figure.axes for line in axes.lines]
    numbers = {
        name
        for name, value in metrics[0].items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }
    for name in numbers:
        wanted = np.array([np.nan if step[name] is None else step[name] for step in metrics])
        if name in ("reward_gap", "teacher_reward") and count > 1:  # measured now and then: its points alone
            wanted = wanted[np.isfinite(wanted)]
        assert any(np.array_equal(curve, wanted, equal_nan=True) for curve in curves), name
    for axes in figure.axes:
        marks = [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == ":"]
        assert marks == ([] if count == 1 else [count // 3 + 0.5])
        skipped = [list(line.get_xdata()) for line in axes.lines if line.get_marker() == "x"]
        assert skipped == ([] if count == 1 else [[3]])

    def levels(title: str) -> list[Any]:
        (axes,) = [axes for name, axes in panels.items() if name.startswith(title)]
        return [line.get_ydata()[0] for line in axes.lines if line.get_linestyle() == "--"]

    assert levels("privileged margin") == [0.05] and levels("teacher gap") == [0.1]
    assert levels("reward gap") == [0.0]
    assert panels["gradient norm before clipping"].get_yscale() == "log"
    kl = panels["divergence from the teacher, nats a token"]
    assert [text.get_text() for text in kl.texts] == ([] if count == 1 else ["reverse KL from here"])
    assert ("mean of the last 5" in figure.get_suptitle()) == (count == 60)
    (stack,) = [axes for axes in figure.axes if axes.collections]
    assert [text.get_text() for text in stack.get_legend().get_texts()] == ["rollout", "backward"]
    top = max(float(area.get_paths()[0].vertices[:, 1].max()) for area in stack.collections)
    assert top == pytest.approx(3.0 + count)
    names = [text.get_text() for text in panels["reward of the step's rollouts"].get_legend().get_texts()]
    assert {"student", "teacher, on some tasks", "g0", "g1"} <= set(names)


class Page(HTMLParser):
    """Tags with what they ask a browser to fetch, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.tags: set[str] = set()
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_report_is_one_file_with_everything(tmp_path: Path):
    metrics = steps_of_a_run(20)
    plot_curves(metrics, tmp_path / "curves.png", margin=0.05, title="a run")
    path = tmp_path / "report.html"
    settings = {"train": {"steps": 20, "out": "<runs/x>"}, "model": {"path": "m"}}
    write_report(path, metrics, tmp_path / "curves.png", settings, title="a <run>")
    text = path.read_text()
    page = Page(text)
    (picture,) = page.fetched
    head = "data:image/png;base64,"
    assert picture.startswith(head)
    assert base64.b64decode(picture.removeprefix(head)) == (tmp_path / "curves.png").read_bytes()
    assert not page.tags & {"script", "link", "iframe", "object"}
    assert "http" not in text and "url(" not in text and "@import" not in text
    cells = page.text
    assert cells.count("a <run>") == 2  # escaped in title and head
    at = cells.index("warning: a <low> gap")
    assert cells[at - 1] == "2"
    assert cells[cells.index("train.out") + 1] == "<runs/x>" and "model.path" in cells
    for name in ("lopd-fast", "Python", "torch", "transformers"):
        assert re.match(r"\d+\.", cells[cells.index(name) + 1]), name
    at = cells.index("teacher's reward less the student's")
    assert cells[at + 1 : at + 3] == ["0.5", "0.5"]  # the last two steps have none: the nearest reading
    at = cells.index("experiences in the bank")
    assert cells[at + 1 : at + 3] == ["4.5", "58.5"]
    assert cells.index("rollout") < cells.index("backward")
    with pytest.raises(UserError, match="no metrics to report"):
        write_report(path, [], tmp_path / "curves.png", {}, title="")


def test_a_picture_of_gaps_alone_is_drawn_and_of_nothing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    figure = drawn([{"step": 1, "student_grad_norm": 0.0}], tmp_path / "gaps.png", monkeypatch)
    (norms,) = [axes for axes in figure.axes if axes.get_title().startswith("gradient norm")]
    assert norms.get_yscale() == "linear"
    empty = [
        axes.get_title() for axes in figure.axes if [t.get_text() for t in axes.texts] == ["not measured"]
    ]
    assert len(empty) == 13  # all but the norms, and the phases
    with pytest.raises(UserError, match="no metrics to plot"):
        plot_curves([], tmp_path / "none.png", margin=0.05, title="")


def test_moving_mean_looks_back_and_leaves_gaps_out():
    values = np.array([math.nan, 2.0, 4.0, math.nan, 6.0, 8.0, math.nan, math.nan, math.nan])
    wanted = [math.nan, 2.0, 3.0, 3.0, 5.0, 7.0, 7.0, 8.0, math.nan]
    np.testing.assert_allclose(_moving_mean(values, 3), wanted)


def test_changes_of_the_divergence():
    names = ["jsd", "jsd", "forward_kl", "forward_kl", "jsd"]
    assert _changes([{"divergence": name} for name in names]) == [(2, "forward KL"), (4, "JSD")]
