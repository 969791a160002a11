"""bench/kl_throughput.py on a CPU, at a size of no interest, without the libraries that it compares with."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

FIELDS = {"name", "rows", "vocab", "hidden", "dtype", "device"}
NUMBERS = {"ms_median", "ratio_to_floor", "tokens_per_s", "peak_extra_mib", "max_rel_err"}
SIZES = ["--vocab", "1500", "--hidden", "32", "--repeats", "3", "--device", "cpu"]
Results = dict[tuple[str, int], dict[str, Any]]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a module of bench/; TRL is missing and Liger fails as it is called, whatever is installed."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "bench"))
    monkeypatch.setitem(sys.modules, "trl", None)
    for module in [name for name in sys.modules if name.startswith("trl.")]:
        monkeypatch.delitem(sys.modules, module)  # else what another test imported is found

    def fails(problem: Any) -> Any:
        def step() -> Any:
            raise RuntimeError("no such kernel\nand a long story")

        return step

    everyone = importlib.import_module("kl_providers").PROVIDERS
    providers = [replace(p, prepare=fails) if p.name.startswith("Liger") else p for p in everyone]
    monkeypatch.setattr(importlib.import_module("kl_throughput"), "PROVIDERS", providers)
    return importlib.import_module


def read(path: Path) -> Results:
    content = json.loads(path.read_text())
    assert set(content) == {"results"}
    return {(row["name"], row["rows"]): row for row in content["results"]}


def test_sweep(bench: Callable[[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--json", str(tmp_path / "f.json"), "--plot", str(tmp_path / "f.png")]
    assert bench("kl_throughput").main([*SIZES, "--rows", "8", "300", *files]) == 0
    printed = capsys.readouterr().out
    results = read(tmp_path / "f.json")
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")

    floor_name = next(name for name, _ in results if "floor" in name)
    fused = {name for name, _ in results if name.startswith("lopd_fast") and "fused" in name}
    assert len(fused) == 2
    for (name, rows), row in results.items():
        assert row.keys() >= FIELDS | NUMBERS
        assert (row["vocab"], row["hidden"], row["dtype"], row["device"]) == (1500, 32, "fp32", "cpu")
        assert name in printed
        if name == floor_name:
            assert row["ratio_to_floor"] == 1
            assert row["max_rel_err"] is None
        elif name.startswith(("TRL", "Liger", "orda")):
            assert all(row[number] is None for number in NUMBERS)
            assert row["note"] in printed
        else:
            floor = results[floor_name, rows]["ms_median"]
            assert row["ratio_to_floor"] == pytest.approx(row["ms_median"] / floor)
            assert row["tokens_per_s"] == pytest.approx(rows / row["ms_median"] * 1e3)
            assert row["ms_20"] <= row["ms_median"] <= row["ms_80"]
            assert row["peak_extra_mib"] > 0
            exact = "lopd_fast" in name and "grad_filter" not in name
            assert 0 < row["max_rel_err"] < (2e-5 if exact else 5e-2), name
    assert results["TRL chunked divergence", 8]["note"] == "trl is not installed"
    assert results["Liger chunked JSD (beta 1)", 8]["note"] == "failed: RuntimeError: no such kernel"
    assert printed.splitlines()[-1].startswith("No GPU was used. A run on one adds")


def test_a_wrong_answer_is_not_passed_over(
    bench: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kl_throughput, loss = bench("kl_throughput"), bench("kl_providers").fused_linear_topk_tail_kl
    shifted = lambda student, weight, teacher, **options: loss(student, weight, teacher.roll(1, 0), **options)  # noqa: E731
    monkeypatch.setattr(bench("kl_providers"), "fused_linear_topk_tail_kl", shifted)
    assert kl_throughput.main([*SIZES, "--rows", "8", "--json", str(tmp_path / "f.json")]) == 1
    assert read(tmp_path / "f.json")["lopd_fast fused", 8]["note"] == "WRONG"


def test_what_does_not_fit_is_not_tried(
    bench: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kl_throughput = bench("kl_throughput")
    assert kl_throughput.main([*SIZES, "--rows", str(10**10)]) == 0
    assert "not run" in capsys.readouterr().out
    large = [
        replace(p, bytes_needed=lambda problem: 3 * 2**60) if p.name.startswith("plain") else p
        for p in kl_throughput.PROVIDERS
    ]
    monkeypatch.setattr(kl_throughput, "PROVIDERS", large)
    assert kl_throughput.main([*SIZES, "--rows", "8", "--json", str(tmp_path / "f.json")]) == 0
    results = read(tmp_path / "f.json")
    assert results["lopd_fast fused", 8]["note"] == ""
    assert results["plain three-pass formula", 8]["note"].startswith(
        "not run: needs about 3,221,225,472.0 GiB"
    )


def test_peak_is_what_is_held_beyond_the_gradients(bench: Callable[[str], Any]) -> None:
    kept = torch.zeros(1 << 20)

    def step() -> dict[str, torch.Tensor]:
        gradient = kept + 1
        for mebibytes in (12, 8):
            torch.ones(mebibytes << 18)
        return {"student": gradient}

    assert bench("measure").peak_extra_bytes(step, torch.device("cpu")) == 12 << 20


def test_estimates_are_no_less_than_what_is_taken(bench: Callable[[str], Any]) -> None:
    peers, measure = bench("kl_providers"), bench("measure")
    problem = bench("kl_problem").make_problem(600, 1500, 32, torch.float32, torch.device("cpu"), k=20)
    for provider in peers.PROVIDERS:
        if provider.name.startswith(("lopd_fast", "plain")) and not provider.needs_cuda:
            peak = measure.peak_extra_bytes(provider.prepare(problem), torch.device("cpu"))
            assert peak <= provider.bytes_needed(problem), provider.name


def test_filter_error_rises_as_columns_fall_away(bench: Callable[[str], Any]) -> None:
    filter_error, problem = (
        bench("filter_error"),
        bench("kl_problem").make_problem(64, 1500, 64, torch.float32, torch.device("cpu"), k=20),
    )
    states = problem.student_hidden.detach(), problem.teacher_hidden.detach()
    labels = torch.zeros(64, dtype=torch.long)
    off, *rows = filter_error.compare(
        filter_error.Problem(*states, problem.weight, labels), [1e-9, 1e-3], 32, 1
    )
    assert (off["student_error"], off["teacher_error"], off["active"]) == (0, 0, 1)
    assert rows[0]["active"] > rows[1]["active"] > 0
    for side in ("student", "teacher"):
        assert rows[0][f"{side}_error"] <= rows[1][f"{side}_error"] < 0.1
    printed = filter_error.table([off, *rows]).splitlines()
    assert len(printed) == 5 and printed[2].startswith("| off |")
