"""What the examples share: by how much a function raises a process's peak memory."""

import multiprocessing
import resource
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any


def peak_of(function: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    """`peak_here` in a new process that has imported what this one has."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(peak_here, function, *args).result()


def peak_here(function: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    """The function's result, and by how many MiB it raised this process's peak, if that only rose until now."""
    before = _peak_mib()
    result = function(*args)
    return result, _peak_mib() - before


def _peak_mib() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
