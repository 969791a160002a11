"""A served teacher: lists of ids and log-probs in place of logits."""

from typing import Any

import pytest
import torch
from ops.oracle import expected, lowest_id_topk, peaked, relative_error
from torch import Tensor

from lopd_fast import fused_linear_topk_tail_kl, topk_tail_kl

WIDTH = 90
INF = float("inf")


def served_list(teacher: Tensor, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The top-k of every row in random order."""
    ids = lowest_id_topk(teacher, k)
    shuffled = torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)).argsort(-1)
    ids = ids.gather(-1, shuffled)
    return ids, teacher.log_softmax(-1).gather(-1, ids)


@pytest.fixture
def pair() -> tuple[Tensor, Tensor]:
    return peaked(2, 3, WIDTH, seed=1), peaked(2, 3, WIDTH, seed=2)


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "jsd"])
@pytest.mark.parametrize("tail", ["bucket", "renormalize", "drop"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_list_equals_the_logits_it_came_from(pair, divergence: str, tail: str, dtype: torch.dtype) -> None:
    student, teacher = pair
    ids, logprobs = served_list(teacher, 5)
    leaf = student.to(dtype).requires_grad_()
    got = topk_tail_kl(leaf, teacher_topk=(ids, logprobs.to(dtype)), divergence=divergence, tail=tail)
    (2 * got.loss).backward()
    leaf64 = leaf.detach().double().requires_grad_()
    want = expected(leaf64, teacher, k=5, divergence=divergence, tail=tail)
    (2 * want.loss).backward()
    tolerance = 2e-5 if dtype == torch.float32 else 1e-9
    assert leaf.grad is not None and leaf64.grad is not None
    # fp32 log-probs of a list that holds 1 - 1e-4 pin its tail to about 1e-3 of itself, and no better.
    if dtype == torch.float32 and tail == "bucket":
        tolerance = 2e-3
    assert relative_error(got.kl, want.kl) < tolerance, "kl"
    assert relative_error(got.student_mass, want.student_mass) < 2e-5, "student_mass"
    assert relative_error(got.teacher_mass, want.teacher_mass) < 2e-5, "teacher_mass"
    assert relative_error(leaf.grad, leaf64.grad) < tolerance, "grad"
    assert torch.equal(got.topk_ids, ids)


def test_lists_of_different_lengths(pair) -> None:
    """k - 1, k, k + 1 and 0 entries a row; padding by id -1, by -inf, by null, by -9999; never read as ids."""
    student, teacher = (x.flatten(0, 1)[:5] for x in pair)
    ids, logprobs = served_list(teacher, 5)
    lengths = [3, 4, 5, 0, 4]
    padding = [[-INF, float("nan")], [-9999.0], [], [-1.0] * 5, [-1.0]]
    for row, length in enumerate(lengths):
        ids[row, length:] = 10**6 if row < 2 else -1
        logprobs[row, length:] = torch.tensor(padding[row], dtype=torch.float64)
    leaf = student.clone().requires_grad_()
    got = topk_tail_kl(leaf, teacher_topk=(ids, logprobs), k=4)
    got.kl.sum().backward()
    assert leaf.grad is not None
    for row, length in enumerate(lengths):
        if length == 0:
            assert got.kl[row].item() == 0 and not leaf.grad[row].any(), "an empty list says nothing"
            continue
        one = student[row : row + 1].clone().requires_grad_()
        want = expected(one, teacher[row : row + 1], ids=ids[row : row + 1, :length])
        want.kl.sum().backward()
        assert one.grad is not None
        assert got.kl[row].item() == pytest.approx(want.kl.item(), rel=1e-9), f"row {row}"
        assert relative_error(leaf.grad[row], one.grad[0]) < 1e-8, f"row {row}"
        assert got.topk_ids[row].tolist() == [*ids[row, :length].tolist(), *[-1] * (5 - length)]


@pytest.mark.parametrize("tail", ["bucket", "renormalize", "drop"])
def test_an_empty_list_is_finite_in_every_tail(tail: str) -> None:
    student = torch.randn(2, 9, requires_grad=True)
    nothing = torch.full((2, 3), -1), torch.zeros(2, 3)
    out = topk_tail_kl(student, teacher_topk=nothing, tail=tail)
    out.loss.backward()
    assert out.loss.item() == 0 and student.grad is not None and not student.grad.any()
    none_at_all = torch.empty(2, 0, dtype=torch.int64), torch.empty(2, 0)
    labels = torch.zeros(2, dtype=torch.int64)
    out = topk_tail_kl(student, teacher_topk=none_at_all, labels=labels, tail=tail)
    assert out.loss.item() == 0 and out.teacher_logprob is not None and out.teacher_logprob.isnan().all()


@pytest.mark.parametrize("learns", [True, False])
def test_an_empty_list_with_a_filter(learns: bool) -> None:
    """No explicit value to measure a threshold by: exact, and 0, since the tail holds everything on both sides."""
    hidden = torch.randn(3, 8, requires_grad=True)
    nothing = torch.empty(3, 0, dtype=torch.int64), torch.empty(3, 0)
    weight = torch.randn(WIDTH, 8, requires_grad=learns)
    fused_linear_topk_tail_kl(hidden, weight, teacher_topk=nothing, grad_filter=1e-5).loss.backward()
    assert hidden.grad is not None and not hidden.grad.any()


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "jsd"])
def test_a_list_that_sums_to_one(divergence: str) -> None:
    """Rounding makes a sure teacher's list 0.0, -30, -31: its tail is below the resolution of fp32, not log 0."""
    student = peaked(1, WIDTH, seed=3).float().requires_grad_()
    certain = torch.tensor([[4, 8, 15]]), torch.tensor([[0.0, -30.0, -31.0]])
    out = topk_tail_kl(student, teacher_topk=certain, divergence=divergence)
    out.loss.backward()
    assert out.loss.isfinite() and student.grad is not None and student.grad.isfinite().all()
    assert out.teacher_mass.item() == pytest.approx(1.0, abs=1e-6)


def test_a_list_of_the_whole_vocabulary_has_no_tail() -> None:
    student, teacher = peaked(3, 6, seed=1), peaked(3, 6, seed=2)
    ids, logprobs = served_list(teacher, 6)
    for divergence in ("reverse_kl", "forward_kl", "jsd"):
        got = topk_tail_kl(student.float(), teacher_topk=(ids, logprobs.float()), divergence=divergence)
        want = expected(student, teacher, k=6, divergence=divergence)
        assert relative_error(got.kl, want.kl) < 2e-5
        assert (got.teacher_mass == 1).all()


def test_labels_and_margin(pair) -> None:
    """log p(a) where the list holds a, NaN where it does not; the margin enters the value, not the gradient."""
    student, teacher = (x.flatten(0, 1) for x in pair)
    ids, logprobs = served_list(teacher, 5)
    labels = ids[:, 2].clone()
    labels[1] = -100
    leaf = student.clone().requires_grad_()
    options: Any = dict(labels=labels, privilege_weight=torch.rand(6), token_weight=torch.rand(6))
    got = topk_tail_kl(leaf, teacher_topk=(ids, logprobs), **options)
    want = expected(leaf, teacher, k=5, **options)
    assert got.loss.item() == pytest.approx(want.loss.item(), rel=1e-9)
    plain = topk_tail_kl(
        leaf, teacher_topk=(ids, logprobs), labels=labels, token_weight=options["token_weight"]
    )
    for a, b in zip(torch.autograd.grad(got.loss, leaf), torch.autograd.grad(plain.loss, leaf), strict=True):
        assert torch.equal(a, b)
    elsewhere = lowest_id_topk(teacher, 6)[:, 5]
    out = topk_tail_kl(student, teacher_topk=(ids, logprobs), labels=elsewhere)
    assert out.teacher_logprob is not None and out.teacher_logprob.isnan().all()
    assert out.loss.isfinite()


def test_fused_with_a_served_teacher() -> None:
    hidden, weight = torch.randn(2, 3, 8, dtype=torch.float64), torch.randn(WIDTH, 8, dtype=torch.float64)
    teacher = peaked(2, 3, WIDTH, seed=5)
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    out = fused_linear_topk_tail_kl(*leaves, teacher_topk=served_list(teacher, 4), chunk_size=4)
    out.loss.backward()
    wanted = [x.clone().requires_grad_() for x in (hidden, weight)]
    want = expected(wanted[0] @ wanted[1].T, teacher, k=4)
    want.loss.backward()
    assert out.loss.item() == pytest.approx(want.loss.item(), rel=1e-9)
    for name, got, wanted_leaf in zip(("hidden", "weight"), leaves, wanted, strict=True):
        assert got.grad is not None and wanted_leaf.grad is not None
        assert relative_error(got.grad, wanted_leaf.grad) < 1e-9, name
