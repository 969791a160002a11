"""bench/gpu_check.py at tiny sizes on the CPU: every part, the file and the table, and a part that fails."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

PARTS = ["roofs", "kernels", "loss", "fused_8192", "fused_40960", "logits", "sweep"]
BENCH = Path(__file__).resolve().parent.parent / "bench"


def load() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_check", BENCH / "gpu_check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_part_passes_at_tiny_sizes(tmp_path: Path) -> None:
    """From another folder, in a process that finds the package by the script's own place."""
    words = [
        sys.executable,
        str(BENCH / "gpu_check.py"),
        "--device",
        "cpu",
        "--small",
        "--out",
        str(tmp_path),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "cpu.json").read_text())
    assert document["versions"].keys() == {"python", "torch", "triton"}
    assert list(document["parts"]) == PARTS
    for name, part in document["parts"].items():
        assert part["status"] == "ok" and part["rows"], name
        assert all(row["ok"] is not False for row in part["rows"]), name
    measured = {row["what"].split(" ")[0] for row in document["parts"]["kernels"]["rows"]}
    kernels = {"block_stats", "select", "support_logprobs", "bucket_divergence", "logits_grad", "row"}
    assert measured == kernels
    assert (tmp_path / "cpu.png").read_bytes().startswith(b"\x89PNG")
    assert "| kernels | row x stride > 2^31 gives the same bits | 1 yes | yes | ok |" in done.stdout


def test_a_part_that_fails_or_hangs_is_recorded_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check = load()
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(check, "describe", lambda device: dict(device="GPU 1", versions={}))

    def run(words: list[str], timeout: float, **_: Any) -> subprocess.CompletedProcess[str]:
        rows = Path(words[words.index("--rows-to") + 1])
        rows.write_text(
            json.dumps(dict(what="a", values=dict(ms=1.5), limit=None, ok=None)) + '\n{"what": "cut'
        )
        if "kernels" in words:
            raise subprocess.TimeoutExpired(words, timeout)
        return subprocess.CompletedProcess(words, int("roofs" in words), "", "RuntimeError: illegal address")

    monkeypatch.setattr(check.subprocess, "run", run)
    assert check.main(["--parts", "roofs", "kernels", "loss", "--out", str(tmp_path)]) == 1
    parts = json.loads((tmp_path / "gpu-1.json").read_text())["parts"]
    assert [part["status"] for part in parts.values()] == ["failed", "stopped after 95 s", "ok"]
    assert all(part["rows"][0]["values"] == {"ms": 1.5} for part in parts.values())
    assert "RuntimeError: illegal address" in capsys.readouterr().out


def test_without_a_gpu_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check = load()
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check.main(["--out", str(tmp_path / "results")]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1 and "sees no GPU" in printed.err
    assert not (tmp_path / "results").exists()


def test_all_parts_fit_into_eight_minutes() -> None:
    check = load()
    assert list(check.BUDGETS) == PARTS
    assert sum(check.BUDGETS.values()) <= 450
