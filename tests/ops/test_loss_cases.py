"""Known ways for a distillation loss to be wrong: a small input and its right value each."""

import math
from typing import Any

import pytest
import torch
from ops.oracle import expected, lowest_id_topk, peaked, relative_error
from torch import Tensor

from lopd_fast import topk_tail_kl

DIVERGENCES = ("reverse_kl", "forward_kl", "jsd")
INF = float("inf")


def run(student: Tensor, teacher: Tensor, **options: Any):
    """The result, and the gradients of its loss."""
    student, teacher = (x.detach().clone().requires_grad_() for x in (student, teacher))
    out = topk_tail_kl(student, teacher, **options)
    return out, *torch.autograd.grad(out.loss, (student, teacher))


def run_oracle(student: Tensor, teacher: Tensor, **options: Any):
    student, teacher = (x.detach().double().requires_grad_() for x in (student, teacher))
    out = expected(student, teacher, **options)
    return out, *torch.autograd.grad(out.loss, (student, teacher))


@pytest.mark.parametrize(
    "mask", [dict(labels=torch.tensor([2, -100])), dict(token_weight=torch.tensor([1.0, 0.0]))]
)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_masked_row_of_minus_infinity(mask: dict[str, Any], divergence: str) -> None:
    student, teacher = torch.randn(2, 5), torch.randn(2, 5)
    teacher[1] = -INF
    out, grad_student, grad_teacher = run(student, teacher, k=2, divergence=divergence, **mask)
    alone, alone_student, _ = run(student[:1], teacher[:1], k=2, divergence=divergence)
    assert torch.equal(out.loss, alone.loss)
    assert torch.equal(grad_student[:1], alone_student)
    assert torch.equal(grad_student[1], torch.zeros(5)) and torch.equal(grad_teacher[1], torch.zeros(5))


@pytest.mark.parametrize(("high", "low"), [(40.0, 38.0), (14.0, 12.0), (28.0, 3.0), (120.0, 100.0)])
def test_tail_is_not_one_minus_a_sum(high: float, low: float) -> None:
    """At 40 and 38 the loss is about 1e-14 and every digit of it comes from tails of 1e-15 and 1e-14."""
    student, teacher = torch.randn(1, 1000), torch.randn(1, 1000)
    student[0, 7], teacher[0, 7] = high, low
    out, grad_student, grad_teacher = run(student, teacher, k=4)
    _, want_student, want_teacher = run_oracle(student, teacher, k=4)
    assert out.loss.item() == pytest.approx(kl_by_small_buckets(student, teacher, 4), rel=1e-4)
    if high < 30:  # beyond, the fp64 oracle's own bucket of probability 1 - 1e-15 is what rounds
        assert relative_error(grad_teacher, want_teacher) < 1e-4
        assert relative_error(grad_student, want_student) < 1e-4
    assert math.isfinite(out.loss.item()) and grad_student.isfinite().all() and grad_teacher.isfinite().all()
    assert out.student_mass.item() <= 1 and out.teacher_mass.item() <= 1


def kl_by_small_buckets(student: Tensor, teacher: Tensor, k: int) -> float:
    """Reverse KL in fp64 as a sum of q log(q / p) + p - q, with the dominant log-probs from log1p of the rest."""
    ids = lowest_id_topk(teacher.double(), k)[0]

    def buckets(logits: Tensor) -> list[float]:
        z = logits[0].double()
        outside = torch.ones(len(z), dtype=torch.bool)
        outside[ids] = False
        values = torch.cat([z[ids], z[outside].logsumexp(0)[None]])
        top = int(values.argmax())
        rest = torch.cat([values[:top], values[top + 1 :]])
        lse = math.log1p(float((rest - values[top]).exp().sum()))
        return [float(v - values[top]) - lse for v in values]

    total = 0.0
    for s, t in zip(buckets(student), buckets(teacher), strict=True):
        x = t - s
        total += math.exp(s) * (math.expm1(x) - x if abs(x) > 1e-3 else x * x / 2 + x**3 / 6)
    return total


def test_log_tail_at_mass_1e12() -> None:
    """A student that leaves 1e-12 outside the support: its log is right to 1e-5, read off a forward KL."""
    student = torch.full((1, 100), -25.0) + torch.rand(1, 100)
    student[0, :3] = torch.tensor([7.0, 6.0, 5.0])
    teacher = torch.randn(1, 100)
    teacher[0, :3] = torch.tensor([9.0, 8.5, 8.0])
    out, *_ = run(student, teacher, k=3, divergence="forward_kl")
    want, *_ = run_oracle(student, teacher, k=3, divergence="forward_kl")
    assert 1e-13 < 1 - want.student_mass.item() < 1e-11
    # The tail contributes p_tail (log p_tail - log q_tail): 1e-5 off in log q_tail moves the loss by p_tail 1e-5.
    p_tail = 1 - want.teacher_mass.item()
    assert abs(out.loss.item() - want.loss.item()) < 1e-5 * p_tail + 1e-7


def test_two_ids() -> None:
    student, teacher = torch.tensor([[0.6, 0.4]]).log(), torch.tensor([[0.9, 0.1]]).log()
    reverse, grad, _ = run(student, teacher, k=1)
    assert reverse.loss.item() == pytest.approx(0.311239, abs=1e-6)
    assert grad[0].tolist() == pytest.approx([-0.430022, 0.430022], abs=1e-6)
    forward, *_ = run(student, teacher, k=1, divergence="forward_kl")
    assert forward.loss.item() == pytest.approx(0.226289, abs=1e-6)


@pytest.mark.parametrize("k", [1, 5, 49])
@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl"])
def test_between_zero_and_the_full_kl(k: int, divergence: str) -> None:
    """Merging ids into a tail never increases a KL. Fifty pairs, from near-equal to unrelated."""
    student = peaked(50, 50, seed=k).float()
    mix = torch.linspace(0, 1, 50)[:, None]
    teacher = (1 - mix) * student + mix * peaked(50, 50, seed=k + 100).float()
    coarse = topk_tail_kl(student, teacher, k=k, divergence=divergence).kl
    full = topk_tail_kl(student, teacher, k=50, divergence=divergence).kl
    assert (coarse >= 0).all()
    assert (coarse <= full * (1 + 1e-5) + 1e-9).all()


def test_no_clamp_at_zero() -> None:
    """Without a tail the sum can be negative, and near 0 rounding can make it so: its gradient stays."""
    student, teacher = peaked(8, 60, seed=1).float(), peaked(8, 60, seed=9).float()
    out, grad, _ = run(student, teacher, k=3, tail="drop")
    want, want_grad, _ = run_oracle(student, teacher, k=3, tail="drop")
    assert (out.kl < 0).any()
    assert relative_error(grad, want_grad) < 2e-5
    close = student + 1e-4 * torch.randn(8, 60)
    out, grad, _ = run(student, close, k=3)
    want, want_grad, _ = run_oracle(student, close, k=3)
    assert (out.kl > 0).all() and relative_error(out.kl, want.kl) < 1e-2
    assert grad.abs().sum(-1).min() > 0 and relative_error(grad, want_grad) < 1e-2


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("tail", ["bucket", "renormalize", "drop"])
def test_k_equal_to_v_is_the_full_divergence(divergence: str, tail: str) -> None:
    student, teacher = peaked(6, 65, seed=1).float(), peaked(6, 65, seed=2).float()
    out, *grads = run(student, teacher, k=65, divergence=divergence, tail=tail)
    want, *want_grads = run_oracle(student, teacher, k=65, divergence=divergence, tail="drop")
    assert relative_error(out.kl, want.kl) < 2e-5
    assert relative_error(grads[0], want_grads[0]) < 2e-5 and relative_error(grads[1], want_grads[1]) < 2e-5
    assert (out.student_mass == 1).all() and (out.teacher_mass == 1).all()


def test_k_one_short_of_v() -> None:
    """The mass of all but one id rounds to 1 and may not pass it; the last id's own log-prob is the tail's."""
    student, teacher = 4 * torch.randn(200, 33), 4 * torch.randn(200, 33)
    out, *grads = run(student, teacher, k=32)
    want, *want_grads = run_oracle(student, teacher, k=32)
    assert (out.student_mass <= 1).all() and (out.teacher_mass <= 1).all()
    assert relative_error(out.kl, want.kl) < 2e-5
    assert relative_error(grads[0], want_grads[0]) < 2e-5 and relative_error(grads[1], want_grads[1]) < 2e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("width", [50, 248_320])
def test_student_is_teacher(dtype: torch.dtype, divergence: str, width: int) -> None:
    logits = peaked(2, width, seed=3).to(dtype)
    out, grad_student, grad_teacher = run(logits, logits, divergence=divergence)
    assert out.kl.tolist() == [0.0, 0.0]
    assert not grad_student.any() and not grad_teacher.any()
    assert (out.student_mass <= 1).all() and torch.equal(out.student_mass, out.teacher_mass)


@pytest.mark.parametrize("logits", [[0.0, -200.0], [0.0, -200.0, -300.0]])
@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_both_sides_underflow(logits: list[float], beta: float) -> None:
    z = torch.tensor([logits])
    for k in range(1, len(logits) + 1):
        out, grad_student, grad_teacher = run(z, z, k=k, divergence="jsd", beta=beta)
        assert out.loss.item() == 0 and not grad_student.any() and not grad_teacher.any()


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_one_side_underflows(divergence: str) -> None:
    """A tail of e^-150 on one side: q_tail / p_tail is not a float32, the loss and its gradients are."""
    student, teacher = torch.zeros(1, 12), torch.zeros(1, 12)
    teacher[0, 3:] = -150.0
    teacher[0, 3:] -= torch.arange(9)
    for a, b in ((student, teacher), (teacher, student)):
        out, *grads = run(a, b, k=3, divergence=divergence)
        want, *want_grads = run_oracle(a, b, k=3, divergence=divergence)
        assert relative_error(out.kl, want.kl) < 2e-5
        for got, wanted in zip(grads, want_grads, strict=True):
            assert (got.double() - wanted).abs().max() <= 2e-5 * wanted.abs().max() + 1e-12


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("k", [2, 5, 9])
def test_columns_that_are_minus_infinity_on_both_sides(divergence: str, k: int) -> None:
    """Padding columns of a head: the loss without them, and gradient 0 there, for k up to past the real ids."""
    student, teacher = peaked(3, 7, seed=1).float(), peaked(3, 7, seed=2).float()
    padded = [torch.cat([x, torch.full((3, 4), -INF)], dim=1) for x in (student, teacher)]
    out, *grads = run(*padded, k=k, divergence=divergence)
    want, *want_grads = run(student, teacher, k=min(k, 7), divergence=divergence)
    assert relative_error(out.kl, want.kl) < 1e-6
    for got, wanted in zip(grads, want_grads, strict=True):
        assert relative_error(got[:, :7], wanted) < 1e-5
        assert torch.equal(got[:, 7:], torch.zeros(3, 4))


@pytest.mark.parametrize("split", [[4, 1], [1, 4], [2, 3], [1, 1, 1, 1, 1], [5]])
@pytest.mark.parametrize(
    "count", [5, 5.0, torch.tensor(5), torch.tensor(5.0), torch.tensor([5], dtype=torch.int32)]
)
def test_accumulation_over_micro_batches(split: list[int], count: Any) -> None:
    """Token losses 1, 2, 3, 4 and 10 are 4.0 on average however they are split, and so are their gradients."""
    kl = torch.tensor([1.0, 2.0, 3.0, 4.0, 10.0])
    # A student certain of id 0, which the teacher gives e^-kl.
    student = torch.tensor([[0.0, -40.0]]).repeat(5, 1).requires_grad_()
    teacher = torch.stack([-kl, torch.log(-torch.expm1(-kl))], dim=1).requires_grad_()
    total = 0.0
    for part_student, part_teacher in zip(student.split(split), teacher.split(split), strict=True):
        loss = topk_tail_kl(part_student, part_teacher, k=1, num_items=count).loss
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(4.0, rel=1e-6)
    whole = topk_tail_kl(student, teacher, k=1)
    assert whole.loss.item() == pytest.approx(4.0, rel=1e-6)
    assert teacher.grad is not None
    assert torch.allclose(teacher.grad, torch.autograd.grad(whole.loss, teacher)[0], rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_ties_at_rank_k_go_to_the_lowest_id(dtype: torch.dtype) -> None:
    """Coarse logits tie in every row: within a block of the search, across blocks, at zeros of both signs, at -inf."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-3, 4, (40, 4133), generator=generator).to(dtype)
    logits[0] = 1.5
    logits[1] = -INF
    logits[1, 4000:4003] = 0.0
    logits[2, ::3] = -0.0
    logits[3] = torch.arange(4133, 0, -1).to(dtype)
    for k in (1, 20, 63, 64, 65, 4133):
        got = topk_tail_kl(torch.randn(40, 4133, dtype=dtype), logits, k=k).topk_ids
        assert torch.equal(got, lowest_id_topk(logits.double(), k)), f"k={k}"


def test_a_large_k_is_searched_for_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randint(-3, 4, (7, 900)).float()
    monkeypatch.setattr("lopd_fast.loss_support.SEARCH_BYTES", 100_000)
    for k in (3, 500):
        got = topk_tail_kl(torch.randn(7, 900), logits, k=k).topk_ids
        assert torch.equal(got, lowest_id_topk(logits.double(), k)), f"k={k}"
