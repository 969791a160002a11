"""Time, memory and error of steps that are compared: what every bench of this folder measures by."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

Step = Callable[[], dict[str, Tensor]]  # runs forward and backward; the loss and the gradients by name
CGROUP = Path("/sys/fs/cgroup")

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch's profiler announces itself on stderr otherwise


def interleaved_ms(
    steps: dict[str, Step], repeats: int, device: torch.device
) -> tuple[dict[str, list[float]], dict[str, Exception]]:
    """Milliseconds of every step, `repeats` times in turns, so that a busy moment of the machine falls on all of them.

    On CUDA the clock is a pair of events around each step and the host waits once, at the end. A step that fails is
    left out from then on and its error is returned.
    """
    events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in steps}
    times: dict[str, list[float]] = {name: [] for name in steps}
    errors: dict[str, Exception] = {}
    for _ in range(repeats):
        for name, step in steps.items():
            if name in errors:
                continue
            try:
                if device.type == "cuda":
                    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    start.record()
                    step()
                    end.record()
                    events[name].append((start, end))
                else:
                    began = time.perf_counter()
                    step()
                    times[name].append(1e3 * (time.perf_counter() - began))
            except Exception as error:  # a peer may fail in its own way; the others go on
                errors[name] = error
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        times = {name: [start.elapsed_time(end) for start, end in pairs] for name, pairs in events.items()}
    return {name: taken for name, taken in times.items() if name not in errors}, errors


def peak_extra_bytes(step: Step, device: torch.device) -> int:
    """Most bytes that torch holds at once during a step, over those held before and the gradients that it returns.

    On CUDA the caching allocator counts. On a CPU the allocator's log is replayed, so memory that a matrix library
    takes for itself is not in it.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        returned = sum(x.nbytes for x in step().values())
        return max(0, torch.cuda.max_memory_allocated(device) - before - returned)
    gc.collect()  # what is freed meanwhile is to be the step's own
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        returned = sum(x.nbytes for x in step().values())
    events: Any = profile.profiler.kineto_results.events()  # type: ignore
    log = sorted(
        (event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns()
    )
    if not log:
        return 0
    return max(0, int(torch.tensor([event.nbytes() for event in log]).cumsum(0).max()) - returned)


def free_bytes(device: torch.device) -> int:
    """Bytes that a step may take: of the device, or of the machine within the limit of its container."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    free = psutil.virtual_memory().available
    try:
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        free = min(free, limit - used)
    except (OSError, ValueError):  # no such container, or one without a limit
        pass
    return free


def quantiles(values: list[float]) -> list[float]:
    """The 20, 50 and 80 % quantiles."""
    return torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.2, 0.5, 0.8]).double()).tolist()


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """|actual - exact| / |exact| in the 2-norm, in fp64."""
    exact = exact.double()
    return float((actual.double() - exact).norm() / exact.norm().clamp_min(1e-300))
