"""The bench of a whole step at its smallest size: both sides run, and their gradients are equal."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench" / "train_step.py"
SMALL = "--rollouts 2 --experiences 2 --response 6 --trace 5 --queries 2 --depth 2 --repeats 1 --vocab 49152"


@pytest.mark.slow
def test_both_sides_take_the_same_step(tmp_path: Path):
    report = tmp_path / "step.json"
    command = [sys.executable, str(BENCH), *SMALL.split(), "--json", str(report)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(report.read_text())
    assert [row["side"] for row in result["sides"]] == ["lopd_fast", "three phases"]
    assert result["gradient_error"] < 1e-4
    assert all(row["seconds"] > 0 and row["peak_mib"] > 50 for row in result["sides"])
    assert "x the speed" in done.stdout
