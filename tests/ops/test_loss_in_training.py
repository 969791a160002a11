"""The loss inside what trainers wrap around it: checkpointing, torch.compile, mixed dtypes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ops.oracle import expected, peaked, relative_error
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lopd_fast import fused_linear_topk_tail_kl, topk_tail_kl

LABELS = torch.tensor([3, -100, 0, 39, 7])
OPTIONS: Any = dict(labels=LABELS, privilege_weight=torch.linspace(-1, 1, 5), k=4)


def from_logits(student: Tensor, weight: Tensor, teacher: Tensor) -> Tensor:
    out = topk_tail_kl(student.tanh() @ weight.T, teacher.sin() @ weight.T, **OPTIONS)
    return out.loss + out.kl.square().mean()


def fused(student: Tensor, weight: Tensor, teacher: Tensor) -> Tensor:
    return 3 * fused_linear_topk_tail_kl(student.tanh(), weight, teacher.sin(), **OPTIONS).loss


def leaves() -> list[Tensor]:
    shapes = ((5, 8), (40, 8), (5, 8))
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("loss", [from_logits, fused])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(loss: Callable[..., Tensor], reentrant: bool) -> None:
    """Recomputed in backward: the same bits."""
    inputs = leaves()
    value = loss(*inputs)
    want = torch.autograd.grad(value, inputs)
    again: Any = checkpoint(loss, *inputs, use_reentrant=reentrant)
    assert torch.equal(again, value)
    again.backward()
    for x, grad in zip(inputs, want, strict=True):
        assert x.grad is not None and torch.equal(x.grad, grad)


@pytest.mark.parametrize("loss", [from_logits, fused])
def test_compiled(loss: Callable[..., Tensor]) -> None:
    """torch.compile leaves the loss to eager mode and compiles what surrounds it."""
    compiled = torch.compile(loss, backend="aot_eager")
    for _ in range(2):
        inputs = leaves()
        want = torch.autograd.grad(loss(*inputs), inputs)
        got = torch.autograd.grad(compiled(*inputs), inputs)
        for a, b in zip(got, want, strict=True):
            assert relative_error(a, b) < 1e-6


@pytest.mark.parametrize("student_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("teacher_dtype", [torch.bfloat16, torch.float32])
def test_logits_of_two_dtypes_under_autocast(student_dtype: torch.dtype, teacher_dtype: torch.dtype) -> None:
    """Autocast changes nothing of a loss whose inputs are there; each gradient has the dtype of its logits."""
    pair = peaked(5, 40, seed=1).to(student_dtype), peaked(5, 40, seed=2).to(teacher_dtype)
    student, teacher = (x.requires_grad_() for x in pair)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = topk_tail_kl(student, teacher, **OPTIONS)
        grads = torch.autograd.grad(out.loss, (student, teacher))
    assert out.loss.dtype == out.kl.dtype == torch.float32
    exact = [x.detach().double().requires_grad_() for x in (student, teacher)]
    want = expected(*exact, **OPTIONS)
    assert abs(out.loss.item() - want.loss.item()) < 2e-5 * want.kl.abs().mean().item()
    for x, got, wanted in zip((student, teacher), grads, torch.autograd.grad(want.loss, exact), strict=True):
        assert got.dtype == x.dtype
        assert relative_error(got, wanted) < (2e-5 if x.dtype == torch.float32 else 6e-3)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_rows_further_apart_than_32_bits(backend: str) -> None:
    """Row 2 starts 2^31 elements behind row 0; the memory in between is reserved and never touched."""
    values = peaked(3, 150, seed=4).bfloat16(), peaked(3, 150, seed=5).bfloat16()
    student, teacher = (torch.empty(2**31 + 150, dtype=torch.bfloat16) for _ in values)
    student, teacher = (x.as_strided((3, 150), (2**30, 1)) for x in (student, teacher))
    results = []
    for x, value in zip((student, teacher), values, strict=True):
        x.copy_(value)
    for pair in ((student, teacher), values):
        inputs = [x.requires_grad_() for x in pair]
        out = topk_tail_kl(*inputs, k=5, labels=torch.tensor([1, 2, 149]), backend=backend)
        results.append((out.kl, out.topk_ids, *torch.autograd.grad(out.kl.sum(), inputs)))
    for far, near in zip(*results, strict=True):
        assert torch.equal(far, near)
