"""200 steps of a small model, with checkpoints and trackers: neither memory nor open files grow."""

import gc
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest
import tiny
from torch import Tensor

from lopd_fast.runs import Run

STEPS = 200
# 100 steps lie between the quarters' middles, so this is 42 KB a step. One run grew by 0.5 MiB, within the allocator;
# live tensors are counted as well, and must not grow at all.
ALLOWED = 4 * 2**20


@pytest.mark.slow
def test_two_hundred_steps_leak_neither_memory_nor_file_handles(tmp_path: Path):
    """The last quarter against the second, as the first warms up; the bank is not to grow, for that is memory too."""
    words = [
        f"train.out={tmp_path}",
        f"train.steps={STEPS}",
        "train.checkpoint_every=5",
        "retrieval.grow=false",
    ]
    run = Run(tiny.parts(*words, "monitor.reward_every=10", "cold_start.steps=2"), say=lambda line: None)
    tasks = run.parts.environment.tasks("train", 12, 0)
    run.open(resume=False)
    run.seed(tasks[:4])
    run.cold_start()
    process = psutil.Process()
    bytes_of, files, tensors = [], [], []

    def hook(_: Any) -> None:
        bytes_of.append(process.memory_info().rss)
        files.append(process.num_fds())
        tensors.append(sum(issubclass(type(each), Tensor) for each in gc.get_objects()))

    run.distil(tasks, hook)
    assert len(bytes_of) == STEPS
    quarter = STEPS // 4
    for name, readings, allowed in (
        ("bytes", bytes_of, ALLOWED),
        ("files", files, 0),
        ("tensors", tensors, 0),
    ):
        second, last = median(readings[quarter : 2 * quarter]), median(readings[-quarter:])
        print(f"{name}: {second:,.0f} in the second quarter, {last:,.0f} in the last")
        assert last - second <= allowed, f"{name} grew from {second:,.0f} to {last:,.0f}"
