"""What `kl_throughput` compares with: the plain formula, and the losses of other libraries by their own interfaces.

Each function takes a problem and gives the step to measure, or raises Unavailable.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch
from kl_problem import Problem
from measure import Step
from torch import Tensor
from torch.nn import functional


class Unavailable(Exception):
    """Why something cannot run here."""


def plain_formula(compiled: bool) -> Callable[[Problem], Step]:
    """The three passes of the method's reference code: the teacher's top-k; the student against it; the teacher once
    more, now with its graph, against the student.

    Each takes an fp32 log-softmax over the whole vocabulary, and the tail is what the top-k leaves of 1.
    """

    def support(hidden: Tensor, weight: Tensor, k: int) -> tuple[Tensor, Tensor]:
        logprobs, ids = _logprobs(hidden, weight).topk(k, dim=-1)
        return ids, logprobs

    def student_kl(hidden: Tensor, weight: Tensor, ids: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        own = _logprobs(hidden, weight).gather(-1, ids)
        return _reverse_kl(own, teacher), own.detach()

    def teacher_kl(hidden: Tensor, weight: Tensor, ids: Tensor, student: Tensor) -> Tensor:
        return _reverse_kl(student, _logprobs(hidden, weight).gather(-1, ids))

    def prepare(problem: Problem) -> Step:
        passes: list[Callable[..., Any]] = [support, student_kl, teacher_kl]
        if compiled:
            # A sweep would else compile its second row count for every one, into slower code.
            passes = [torch.compile(x, dynamic=False) for x in passes]

        def step() -> dict[str, Tensor]:
            with torch.no_grad():
                ids, teacher = passes[0](problem.teacher_hidden, problem.weight, problem.k)
            loss, student = passes[1](problem.student_hidden, problem.weight, ids, teacher)
            result = problem.gradients(loss, "student")
            loss = passes[2](problem.teacher_hidden, problem.weight, ids, student)
            return result | problem.gradients(loss, "teacher")

        return step

    return prepare


def _logprobs(hidden: Tensor, weight: Tensor) -> Tensor:
    return functional.log_softmax((hidden @ weight.t()).float(), dim=-1)


def _reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    s, t = _with_tail(student), _with_tail(teacher)
    return (s.exp() * (s - t)).sum(-1).mean()


def _with_tail(logprobs: Tensor) -> Tensor:
    mass = logprobs.logsumexp(-1, keepdim=True).clamp(max=-1e-7)
    return torch.cat([logprobs, torch.log(-torch.expm1(mass))], dim=-1)


def trl_chunked(problem: Problem) -> Step:
    function = _imported("trl.kernels.chunked_divergence", "ChunkedDivergenceFunction")
    teacher = problem.teacher_hidden.detach()  # it gives the teacher no gradient

    def step() -> dict[str, Tensor]:
        per_row, _ = function.apply(
            problem.student_hidden, problem.weight, None, teacher, problem.weight, None, 1.0
        )
        return problem.gradients(per_row.mean(), "student")

    return step


def trl_sdpo(problem: Problem) -> Step:
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    loss_of = _imported("trl.experimental.sdpo.loss_utils", "compute_topk_self_distillation_loss")

    def step() -> dict[str, Tensor]:
        logits = [x @ problem.weight.t() for x in (problem.student_hidden, problem.teacher_hidden)]
        options = dict(distillation_topk=problem.k, distillation_alpha=1.0, distillation_add_tail=True)
        return problem.gradients(loss_of(*logits, **options).mean(), "student", "teacher")

    return step


def liger_chunked(problem: Problem) -> Step:
    loss_class = _imported("liger_kernel.chunked_loss", "LigerFusedLinearJSDLoss")
    loss_of = loss_class(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=1.0)
    labels = torch.zeros(problem.rows, dtype=torch.long, device=problem.weight.device)
    teacher = problem.teacher_hidden.detach()

    def step() -> dict[str, Tensor]:
        loss = loss_of(problem.student_hidden, problem.weight, teacher, problem.weight, labels)
        return problem.gradients(loss, "student")

    return step


def liger_triton(problem: Problem) -> Step:
    loss_class = _imported("liger_kernel.transformers.fused_linear_jsd", "LigerFusedLinearJSD")
    loss_of = loss_class(jsd_beta=1.0)
    teacher = problem.teacher_hidden.detach()

    def step() -> dict[str, Tensor]:
        loss = loss_of(problem.student_hidden, problem.weight, teacher, problem.weight, None)
        return problem.gradients(loss, "student")

    return step


def orda(problem: Problem) -> Step:
    _imported("orda_kernel", "__name__")
    raise Unavailable("installed, but this bench has no call for it yet")


def _imported(module: str, name: str) -> Any:
    package = module.split(".")[0].replace("_", "-")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name and module.startswith(error.name):
            raise Unavailable(f"{package} is not installed") from None
        raise
