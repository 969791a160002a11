"""Who takes part in `kl_throughput`: the dense floor, ours and the peers.

All work on the same tensors, compute a reverse KL, mean over the rows, and ask for the gradients of both hidden states
where they can; heads are frozen. Over which ids, and what else they do, `computes` says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import kl_peers as peers
import torch
from kl_problem import FULL, STUDENT_TOPK, TEACHER_TOPK, Problem
from measure import Step
from torch import Tensor

from lopd_fast import fused_linear_topk_tail_kl, topk_tail_kl

GRAD_FILTER = 1e-5
FLOOR_LOGITS_BYTES = {"cpu": 512 << 20, "cuda": 4 << 30}


@dataclass(frozen=True)
class Provider:
    name: str
    computes: str
    answer: str | None  # which exact answer of `kl_problem` its result is held against
    prepare: Callable[[Problem], Step]  # raises peers.Unavailable
    bytes_needed: Callable[[Problem], float]  # upper estimate of what a step takes beyond its inputs
    needs_cuda: bool = False
    tolerance: Mapping[torch.dtype, float] = field(
        default_factory=dict
    )  # of its error, where it must be exact


def dense_floor(problem: Problem) -> Step:
    """Two products forward and two back into memory that is there before the clock starts, and nothing else.

    On a CPU without units for half precision, fp32 products of widened operands are faster: the faster of both counts.
    """
    device, dtype = problem.weight.device, _product_dtype(problem)
    weight = problem.weight.to(dtype)
    hidden = [x.detach().to(dtype) for x in (problem.student_hidden, problem.teacher_hidden)]
    most = FLOOR_LOGITS_BYTES[device.type] // (problem.vocab * dtype.itemsize)
    chunk = min(problem.rows, max(1, most))
    logits = torch.empty(chunk, problem.vocab, dtype=dtype, device=device)
    grads = [torch.empty_like(x) for x in hidden]

    def step() -> dict[str, Tensor]:
        for start in range(0, problem.rows, chunk):
            part = slice(start, min(start + chunk, problem.rows))
            for x, grad in zip(hidden, grads, strict=True):
                out = logits[: part.stop - start]
                torch.mm(x[part], weight.t(), out=out)
                torch.mm(out, weight, out=grad[part])
        return {}

    return step


def _product_dtype(problem: Problem) -> torch.dtype:
    dtype = problem.weight.dtype
    if dtype == torch.float32 or problem.weight.is_cuda:
        return dtype
    seconds = {}
    for kind in (dtype, torch.float32):
        x = torch.ones(64, problem.hidden, dtype=kind)
        weight = problem.weight[:4096].to(kind)
        torch.mm(x, weight.t())
        began = time.perf_counter()
        torch.mm(x, weight.t())
        seconds[kind] = time.perf_counter() - began
    return min(seconds, key=lambda kind: seconds[kind])


def _floor_bytes(problem: Problem) -> float:
    return FLOOR_LOGITS_BYTES[problem.weight.device.type] + 2 * problem.weight.nbytes


def ours_fused(grad_filter: float | None) -> Callable[[Problem], Step]:
    def prepare(problem: Problem) -> Step:
        def step() -> dict[str, Tensor]:
            out = fused_linear_topk_tail_kl(
                problem.student_hidden,
                problem.weight,
                problem.teacher_hidden,
                k=problem.k,
                grad_filter=grad_filter,
            )
            return problem.gradients(out.loss, "student", "teacher")

        return step

    return prepare


def ours_logits(problem: Problem) -> Step:
    def step() -> dict[str, Tensor]:
        logits = [x @ problem.weight.t() for x in (problem.student_hidden, problem.teacher_hidden)]
        return problem.gradients(topk_tail_kl(*logits, k=problem.k).loss, "student", "teacher")

    return step


def _full(tensors: float) -> Callable[[Problem], float]:
    """Bytes of that many fp32 tensors of all rows x vocabulary, and of both logits where the inputs are half."""

    def needed(problem: Problem) -> float:
        half = 2 * problem.weight.itemsize if problem.weight.dtype != torch.float32 else 0
        return _fixed(problem) + problem.rows * problem.vocab * (4 * tensors + half)

    return needed


def _chunk(rows: int, tensors: float, heads: float = 0) -> Callable[[Problem], float]:
    """Bytes of that many fp32 tensors of at most `rows` rows x vocabulary, and of fp32 tensors like the head."""

    def needed(problem: Problem) -> float:
        chunk = tensors * min(rows, problem.rows) * problem.vocab
        return _fixed(problem) + 4 * (chunk + heads * problem.weight.numel())

    return needed


def _tiles(problem: Problem) -> float:
    """Of TRL's tiles of 4,096 rows x 32,768 columns; on a CPU its elementwise steps make some more."""
    return _fixed(problem) + 4 * 12 * min(4096, problem.rows) * min(32_768, problem.vocab)


def _fixed(problem: Problem) -> float:
    """What methods take that do not grow with the rows."""
    return 2.5e9 if problem.weight.is_cuda else 0.6e9


PROVIDERS = (
    Provider("dense GEMM floor", "two products forward, two back; no loss", None, dense_floor, _floor_bytes),
    Provider(
        "lopd_fast fused",
        "top-20 of the teacher and tail; both gradients",
        TEACHER_TOPK,
        ours_fused(None),
        _fixed,
        tolerance={torch.float32: 2e-5, torch.bfloat16: 6e-3, torch.float16: 6e-3},
    ),
    Provider(
        f"lopd_fast fused, grad_filter {GRAD_FILTER:g}",
        "the same, gradients over active columns",
        TEACHER_TOPK,
        ours_fused(GRAD_FILTER),
        _fixed,
    ),
    Provider(
        "lopd_fast logits",
        "top-20 of the teacher and tail, from full logits; both gradients",
        TEACHER_TOPK,
        ours_logits,
        _full(4),
        tolerance={torch.float32: 2e-5},  # in half precision the logits are rounded before the loss sees them
    ),
    Provider(
        "plain three-pass formula",
        "top-20 of the teacher and tail; both gradients, one pass each",
        TEACHER_TOPK,
        peers.plain_formula(compiled=False),
        _full(4),
    ),
    Provider(
        "plain formula, torch.compile",
        "top-20 of the teacher and tail; both gradients, one pass each",
        TEACHER_TOPK,
        peers.plain_formula(compiled=True),
        _full(4),
        needs_cuda=True,
    ),
    Provider(
        "TRL chunked divergence",
        "full vocabulary; student's gradient",
        FULL,
        peers.trl_chunked,
        _tiles,
    ),
    Provider(
        "TRL SDPO top-k loss",
        "top-20 of the student and tail; both gradients",
        STUDENT_TOPK,
        peers.trl_sdpo,
        _full(8),
    ),
    Provider(
        "Liger chunked JSD (beta 1)",
        "full vocabulary; gradients of student and head",
        FULL,
        peers.liger_chunked,
        _chunk(2047, 8, heads=2),
    ),
    Provider(
        "Liger Triton fused linear JSD (beta 1)",
        "full vocabulary; student's gradient",
        FULL,
        peers.liger_triton,
        _chunk(4096, 8),
        needs_cuda=True,
    ),
    Provider("orda-kernel", "", None, peers.orda, _fixed),
)
