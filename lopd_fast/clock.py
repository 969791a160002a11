"""Where a step's time and memory go."""

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

MIB = 2**20


class StepClock:
    """Seconds by phase and the peak memory of one step.

    On CUDA, where launches return before the work is done, phases are timed by events and nothing waits for them until
    `seconds` is asked for.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._started = time.perf_counter()
        self.latest = ""  # the phase that was entered last
        if self._cuda is not None:
            torch.cuda.reset_peak_memory_stats(self._cuda)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what happens inside towards `name`; phases do not nest."""
        self.latest = name
        if self._cuda is None:
            started = time.perf_counter()
            yield
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started
        else:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((name, begin, end))

    def seconds(self) -> dict[str, float]:
        """Seconds by phase so far."""
        if self._events:
            torch.cuda.synchronize(self._cuda)
        for name, begin, end in self._events:
            self._seconds[name] = self._seconds.get(name, 0.0) + begin.elapsed_time(end) / 1e3
        self._events.clear()
        return dict(self._seconds)

    def total(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self._started

    def peak_mib(self) -> float:
        """MiB: on CUDA the most that tensors held in this step, elsewhere the process's largest resident size yet."""
        if self._cuda is not None:
            return torch.cuda.max_memory_allocated(self._cuda) / MIB
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / MIB if sys.platform == "darwin" else peak / 1024  # bytes there, KiB on Linux
