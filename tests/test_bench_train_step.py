"""The bench of a whole step at its smallest size: both sides run, and their gradients are equal."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench" / "train_step.py"
SMALL = "--checkpointing both --rollouts 2 --experiences 2 --response 6 --trace 5"
SMALL += " --queries 2 --depth 2 --repeats 1 --vocab 49152"


@pytest.mark.slow
def test_both_sides_take_the_same_step(tmp_path: Path):
    report, picture = tmp_path / "step.json", tmp_path / "step.png"
    command = [sys.executable, str(BENCH), *SMALL.split(), "--json", str(report)]
    done = subprocess.run([*command, "--plot", str(picture)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(report.read_text())["results"]
    assert [row["setting"]["checkpointing"] for row in results] == [False, True]
    for row in results:
        assert row["gradient_error"] < 1e-3
        for side in ("lopd_fast", "three phases"):
            assert row[side]["seconds"] > 0 and row[side]["peak_mib"] > 50
        assert row["three phases"]["seconds"] > row["three phases"]["disk"] > 0
        assert f"| {row['speed']:.2f} |" in done.stdout and f"| {row['peak']:.0%} |" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
