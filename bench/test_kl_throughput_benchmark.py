"""The providers of `kl_throughput` under pytest-benchmark, for comparing one's own commits:

    PYTHONPATH=bench pytest bench/test_kl_throughput_benchmark.py --benchmark-autosave
    PYTHONPATH=bench pytest bench/test_kl_throughput_benchmark.py --benchmark-compare

Sizes are those of a small model; on a GPU, of a large one. The normal suite does not collect this folder.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kl_peers import Unavailable
from kl_problem import Problem, make_problem
from kl_providers import PROVIDERS, Provider

GPU = torch.cuda.is_available()


@pytest.fixture(scope="module")
def problem() -> Problem:
    if GPU:
        return make_problem(8192, 151_936, 4096, torch.bfloat16, torch.device("cuda"), k=20)
    return make_problem(256, 49_152, 576, torch.float32, torch.device("cpu"), k=20)


@pytest.mark.parametrize("provider", PROVIDERS, ids=lambda provider: provider.name)
def test_forward_and_backward(benchmark: Any, problem: Problem, provider: Provider) -> None:
    if provider.needs_cuda and not GPU:
        pytest.skip("needs a GPU")
    try:
        step = provider.prepare(problem)
    except Unavailable as reason:
        pytest.skip(str(reason))

    def run() -> None:
        step()
        if GPU:
            torch.cuda.synchronize()

    benchmark.extra_info.update(rows=problem.rows, vocab=problem.vocab, hidden=problem.hidden)
    benchmark.pedantic(run, rounds=5, warmup_rounds=1)
