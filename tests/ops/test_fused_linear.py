"""fused_linear_topk_tail_kl against the plain formula on fp64 logits: values, and the gradient of every input."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from ops.heads import (
    BF16,
    FP32,
    HIDDEN,
    ROWS,
    TEACHER_HIDDEN,
    UPSTREAM,
    WIDTH,
    inputs,
    leaves_of,
    oracle_gradients,
    oracle_logits,
    row_options,
)
from ops.oracle import relative_error
from torch import Tensor

from lopd_fast import TopKTailKL, fused_linear_topk_tail_kl, topk_tail_kl

Leaves = Callable[[dict[str, Tensor]], dict[str, Any]]


@pytest.fixture(params=["heads that learn", "frozen heads"])
def leaves_for(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Leaves:
    """Logits of frozen heads are never held whole; both go by tiles of 64 columns here, so that there are several."""
    monkeypatch.setattr("lopd_fast.fused_tiles.TILE_BYTES", 1)
    monkeypatch.setattr("lopd_fast.fused_tiles.TILE_COLUMNS", 64)
    return partial(leaves_of, frozen_heads=request.param == "frozen heads")


def check(out: TopKTailKL, x: dict[str, Any], want: Any, grads: dict[str, Any], tolerance: float) -> None:
    counts = out.kl != 0
    assert out.loss.dtype == (torch.float64 if x["student_hidden"].dtype == torch.float64 else torch.float32)
    scale = max(want.kl.abs().mean().item(), abs(want.loss.item()))
    assert abs(out.loss.item() - want.loss.item()) <= FP32 * scale, "loss"
    assert relative_error(out.kl[counts], want.kl[counts]) < FP32, "kl"
    assert relative_error(out.student_mass[counts], want.student_mass[counts]) < FP32, "student_mass"
    assert relative_error(out.teacher_mass[counts], want.teacher_mass[counts]) < FP32, "teacher_mass"
    for name in ("privilege", "student_logprob", "teacher_logprob"):
        assert relative_error(getattr(out, name)[counts], getattr(want, name)[counts]) < FP32, name
    assert torch.equal(out.topk_ids[counts], want.topk_ids[counts]), "topk_ids"
    for name, leaf in x.items():
        if not leaf.requires_grad:
            continue
        assert leaf.grad is not None and leaf.grad.dtype == leaf.dtype, name
        error = relative_error(leaf.grad, grads[name])
        assert error < tolerance, f"gradient of {name}: relative error {error:.2e}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("scale", "cap"), [(1.0, None), (0.25, None), (1.3, 5.0)])
def test_heads(
    dtype: torch.dtype, tied: bool, bias: bool, scale: float, cap: float | None, leaves_for: Leaves
) -> None:
    """Tied or own, with bias, logit scale (Cohere, Granite) and soft-cap (Gemma 2), in chunks that do not divide N."""
    x = inputs(dtype, tied, bias)
    want, grads = oracle_gradients(x, scale, cap, temperature=0.8, **row_options())
    leaves = leaves_for(x)
    out = fused_linear_topk_tail_kl(
        **leaves, temperature=0.8, logit_scale=scale, logit_softcap=cap, chunk_size=4, **row_options()
    )
    (UPSTREAM * out.loss).backward()
    check(out, leaves, want, grads, FP32 if dtype == torch.float32 else BF16)


@pytest.mark.parametrize(
    ("divergence", "tail", "support"),
    list(
        product(
            ["reverse_kl", "forward_kl", "jsd"], ["bucket", "renormalize", "drop"], ["teacher", "student"]
        )
    ),
)
def test_every_divergence(divergence: str, tail: str, support: str, leaves_for: Leaves) -> None:
    x = inputs(torch.float32, tied=True, bias=False)
    options: Any = dict(divergence=divergence, beta=0.3, tail=tail, support=support, **row_options())
    want, grads = oracle_gradients(x, **options)
    leaves = leaves_for(x)
    out = fused_linear_topk_tail_kl(**leaves, chunk_size=5, **options)
    (UPSTREAM * out.loss).backward()
    check(out, leaves, want, grads, FP32)


def test_gradcheck() -> None:
    x = {name: value.requires_grad_() for name, value in inputs(torch.float64, tied=False, bias=True).items()}
    options = row_options()
    options["privilege_weight"] = None  # its student side stops, which numerical derivatives would see

    def loss(*tensors: Tensor) -> Tensor:
        named: Any = dict(zip(x, tensors, strict=True))
        return fused_linear_topk_tail_kl(**named, chunk_size=4, logit_softcap=9.0, **options).loss

    assert torch.autograd.gradcheck(loss, tuple(x.values()), fast_mode=True)


@pytest.mark.parametrize("chunk", [1, 3, 11, 1000, None])
@pytest.mark.parametrize("masked", [True, False])
def test_equals_the_loss_on_logits_at_every_chunk_size(chunk: int | None, masked: bool) -> None:
    x: Any = inputs(torch.float32, tied=True, bias=True)
    out = fused_linear_topk_tail_kl(**x, chunk_size=chunk, **row_options(masked))
    want = topk_tail_kl(*oracle_logits(x, 1.0, None), **row_options(masked))
    for name in (
        "loss",
        "kl",
        "privilege",
        "student_logprob",
        "teacher_logprob",
        "student_mass",
        "teacher_mass",
    ):
        assert torch.allclose(getattr(out, name), getattr(want, name), rtol=1e-4, atol=1e-5), name
    assert torch.equal(out.topk_ids, want.topk_ids), "topk_ids"


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16, torch.float16])
def test_mixed_precision(
    autocast: torch.dtype | None, hidden: torch.dtype, weight: torch.dtype, leaves_for: Leaves
) -> None:
    """Operands are rounded as autocast would; the loss is fp32 and each gradient has the dtype of its tensor."""
    x = inputs(torch.float32, tied=True, bias=True)
    x = {name: value.to(hidden if "hidden" in name else weight) for name, value in x.items()}
    leaves = leaves_for(x)
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        out = fused_linear_topk_tail_kl(**leaves, chunk_size=4, **row_options())
        (UPSTREAM * out.loss).backward()
    rounded = x if autocast is None else {n: v if "bias" in n else v.to(autocast) for n, v in x.items()}
    want, grads = oracle_gradients(rounded, **row_options())
    check(out, leaves, want, grads, FP32 if hidden == weight == torch.float32 and autocast is None else BF16)


def test_fp16_gradients_survive_until_the_loss_is_scaled(leaves_for: Leaves) -> None:
    """One row in 2^20 has gradients far below the smallest fp16; a scaler's factor brings them back."""
    x = inputs(torch.float16, tied=True, bias=False)
    leaves = leaves_for(x)
    out = fused_linear_topk_tail_kl(**leaves, num_items=2**24, **row_options())
    (2**16 * out.loss).backward()
    want, grads = oracle_gradients(x, num_items=2**24, **row_options())
    for name, leaf in leaves.items():
        if leaf.requires_grad:
            assert relative_error(leaf.grad, grads[name] * 2**16 / UPSTREAM) < BF16, name


@pytest.mark.parametrize("width", [1, 2, 31, 127, 129, 1025])
def test_vocabulary_sizes(width: int, leaves_for: Leaves) -> None:
    x = inputs(torch.float32, tied=False, bias=True)
    x = {name: value if "hidden" in name else value[:width].contiguous() for name, value in x.items()}
    if width > WIDTH:
        x["student_weight"], x["teacher_weight"] = (
            torch.randn(width, HIDDEN),
            torch.randn(width, TEACHER_HIDDEN),
        )
        x["student_bias"], x["teacher_bias"] = torch.randn(width), torch.randn(width)
    options: Any = dict(
        k=min(3, width), labels=torch.zeros(ROWS, dtype=torch.int64), privilege_weight=torch.ones(ROWS)
    )
    leaves = leaves_for(x)
    out = fused_linear_topk_tail_kl(**leaves, **options)
    (UPSTREAM * out.loss).backward()
    want, grads = oracle_gradients(x, **options)
    assert abs(out.loss.item() - want.loss.item()) <= FP32 * max(1.0, abs(want.loss.item()))
    for name, leaf in leaves.items():
        if not leaf.requires_grad:
            continue
        if width == 1:
            assert not leaf.grad.any(), name
        else:
            assert relative_error(leaf.grad, grads[name]) < FP32, name


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_student_is_teacher(dtype: torch.dtype, learns: bool) -> None:
    """Equal hidden states under one head: exactly 0, whatever a product does with rows at different places in it."""
    hidden = torch.randn(37, HIDDEN).to(dtype)
    weight = torch.randn(5003, HIDDEN).to(dtype).requires_grad_(learns)
    student, teacher = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    out = fused_linear_topk_tail_kl(student, weight, teacher, chunk_size=16)
    out.loss.backward()
    assert out.loss.item() == 0
    for name, leaf in (("student", student), ("teacher", teacher), *[("weight", weight)] * learns):
        assert leaf.grad is not None and not leaf.grad.any(), name


@pytest.mark.parametrize("learns", [True, False])
def test_tails_far_below_what_stands_before_them(learns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tail that is -inf in the first tiles and around -500 in the next: what stands before counts for nothing."""
    monkeypatch.setattr("lopd_fast.fused_tiles.TILE_BYTES", 1)
    monkeypatch.setattr("lopd_fast.fused_tiles.TILE_COLUMNS", 64)
    x = inputs(torch.float32, tied=True, bias=True)
    x["student_bias"][:130] = -torch.inf
    x["student_bias"][130:] -= 500
    options: Any = dict(k=3, labels=torch.full((ROWS,), 250), privilege_weight=torch.ones(ROWS))
    want, grads = oracle_gradients(x, **options)
    leaves = leaves_of(x, frozen_heads=not learns)
    out = fused_linear_topk_tail_kl(**leaves, **options)
    (UPSTREAM * out.loss).backward()
    check(out, {name: leaf for name, leaf in leaves.items() if "hidden" in name}, want, grads, FP32)


def test_leading_dimensions_and_strides() -> None:
    x: Any = inputs(torch.float32, tied=True, bias=False)
    flat = fused_linear_topk_tail_kl(
        x["student_hidden"][:10], x["student_weight"], x["teacher_hidden"][:10], k=3
    )
    student = (
        x["student_hidden"][:10].view(2, 5, -1).transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    )
    weight = x["student_weight"].t().contiguous().t().requires_grad_()
    teacher = x["teacher_hidden"][:10].view(2, 5, -1)
    labels = torch.zeros(2, 5, dtype=torch.int64)
    out = fused_linear_topk_tail_kl(student, weight, teacher, labels=labels, k=3)
    out.loss.backward()
    assert torch.allclose(out.kl.flatten(), flat.kl, rtol=1e-5)
    assert out.topk_ids.shape == (2, 5, 3) and torch.equal(out.topk_ids.flatten(0, 1), flat.topk_ids)
    assert student.grad is not None and student.grad.shape == student.shape
