"""What the examples share: running a function in a process of its own, whose peak memory is then the function's."""

import multiprocessing
import resource
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any


def peak_of(function: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    """The function's result, and by how many MiB it raised the peak memory of a process that had torch loaded."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_measure, function, args).result()


def _measure(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, float]:
    before = _peak_mib()
    result = function(*args)
    return result, _peak_mib() - before


def _peak_mib() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
