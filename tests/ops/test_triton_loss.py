"""The loss with backend="triton", in Triton's interpreter: against the plain formula in fp64 and against torch."""

from itertools import product
from typing import Any

import pytest
import torch
from ops.oracle import expected, lowest_id_topk, peaked, relative_error
from torch import Tensor

from lopd_fast import fused_linear_topk_tail_kl, topk_tail_kl

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of branches that `where` drops
OUTPUTS = ("kl", "privilege", "student_logprob", "teacher_logprob", "student_mass", "teacher_mass")
GRID = list(product(("reverse_kl", "forward_kl", "jsd"), ("bucket", "renormalize", "drop")))


def logits_pair(
    rows: int, width: int, seed: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    student = peaked(rows, width, seed=seed)
    teacher = 0.6 * student + 0.6 * peaked(rows, width, seed=seed + 1)
    return student.to(dtype), teacher.to(dtype)


def run(student: Tensor, teacher: Tensor, **options: Any) -> Any:
    """The result and both gradients, with an upstream gradient that is not 1."""
    student, teacher = (x.detach().requires_grad_() for x in (student, teacher))
    out = topk_tail_kl(student, teacher, **options)
    return out, *torch.autograd.grad(3.0 * out.loss, (student, teacher))


def check(student: Tensor, teacher: Tensor, tolerance: float = 2e-5, **options: Any) -> None:
    out, *grads = run(student, teacher, backend="triton", **options)
    leaves = [x.detach().double().requires_grad_() for x in (student, teacher)]
    want = expected(*leaves, **options)
    want_grads = torch.autograd.grad(3.0 * want.loss, leaves)
    counts = torch.ones(len(student), dtype=torch.bool)
    if options.get("labels") is not None:
        counts = options["labels"] >= 0
    scale = max(abs(want.loss.item()), float(want.kl.abs().mean()))
    assert abs(out.loss.item() - want.loss.item()) <= 2e-5 * scale, "loss"
    assert torch.equal(out.topk_ids[counts], want.topk_ids[counts]), "topk_ids"
    for name in OUTPUTS:
        got, wanted = getattr(out, name), getattr(want, name)
        if wanted is None:
            assert got is None, name
        else:
            assert relative_error(got[counts], wanted[counts]) <= 2e-5, name
    for name, got, wanted in zip(("student", "teacher"), grads, want_grads, strict=True):
        assert got.dtype == student.dtype, name
        assert relative_error(got, wanted) <= tolerance, f"{name} grad"
        assert not got[~counts].any(), f"{name} grad of a row that does not count"


@pytest.mark.parametrize(("divergence", "tail"), GRID)
def test_every_divergence(divergence: str, tail: str) -> None:
    support = "student" if tail == "renormalize" else "teacher"
    labels = torch.tensor([3, -100, 250])
    options: Any = dict(labels=labels, privilege_weight=torch.randn(3), token_weight=torch.rand(3) + 0.5)
    options |= dict(divergence=divergence, tail=tail, support=support, beta=0.3, temperature=0.7, k=5)
    check(*logits_pair(3, 252, seed=3), **options)


@pytest.mark.parametrize(("width", "k"), [(1, 1), (7, 7), (61, 3), (129, 1), (4160, 20)])
def test_vocabulary_sizes(width: int, k: int) -> None:
    student, teacher = logits_pair(2, width, seed=width)
    if width == 1:
        assert topk_tail_kl(student, teacher, k=1, backend="triton").loss.item() == 0
    else:
        check(student, teacher, k=k)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    check(
        *logits_pair(2, 252, 21, dtype),
        6e-3,
        k=7,
        labels=torch.tensor([5, 9]),
        privilege_weight=torch.rand(2),
    )


def test_ties_go_to_the_lowest_id() -> None:
    teacher = torch.zeros(1, 200)
    teacher[0, [190, 70, 5]] = 1.0
    teacher[0, 64] = -0.0
    out = topk_tail_kl(torch.randn(1, 200), teacher, k=6, backend="triton")
    assert out.topk_ids.tolist() == [[5, 70, 190, 0, 1, 2]]


@pytest.mark.parametrize(("high", "low"), [(14.0, 12.0), (36.0, 34.0)])
def test_small_tails_keep_their_digits(high: float, low: float) -> None:
    """All of the loss comes from tails of about e^-high."""
    student, teacher = torch.randn(2, 1, 300)
    student[0, 7], teacher[0, 7] = high, low
    student, teacher = student.requires_grad_(), teacher.requires_grad_()
    out = topk_tail_kl(student, teacher, k=3, backend="triton")
    out.kl.sum().backward()
    ids = lowest_id_topk(teacher, 3)[0]
    outside = torch.ones(300, dtype=torch.bool).scatter(0, ids, False)
    tails = [
        (x[0, outside].double().logsumexp(0) - x[0].double().logsumexp(0)).exp() for x in (student, teacher)
    ]
    q, p = tails
    assert out.student_mass.item() <= 1 and out.teacher_mass.item() <= 1
    assert student.grad is not None and teacher.grad is not None
    assert teacher.grad[0, outside].double().sum().item() == pytest.approx((p - q).item(), rel=5e-5)


def test_rows_that_do_not_count_are_not_read() -> None:
    """Strided rows and columns, NaN in what is masked, and rows in front of and behind those that count."""
    base = [torch.full((2, 300, 5), float("nan")) for _ in range(2)]
    values = logits_pair(4, 100, seed=9)
    labels = torch.tensor([[-100, 3, -100, 99, -100], [7, -100, 8, -100, -100]])
    for x, value in zip(base, values, strict=True):
        x.transpose(1, 2)[:, :, ::3][labels >= 0] = value
    leaves = [x.requires_grad_() for x in base]
    views = [x.transpose(1, 2)[:, :, ::3] for x in leaves]
    assert views[0].stride(-1) != 1 and not views[0].is_contiguous()
    out = topk_tail_kl(*views, labels=labels, k=4, backend="triton")
    grads = torch.autograd.grad(out.kl.sum() + 2 * out.privilege.sum(), leaves)  # type: ignore[union-attr]
    wanted = [x.double().requires_grad_() for x in values]
    want = expected(*wanted, labels=labels[labels >= 0], k=4)
    want_grads = torch.autograd.grad(want.kl.sum() + 2 * want.privilege.sum(), wanted)  # type: ignore[union-attr]
    assert relative_error(out.kl[labels >= 0], want.kl) <= 2e-5, "kl"
    for name, grad, want_grad in zip(("student", "teacher"), grads, want_grads, strict=True):
        rows = grad.transpose(1, 2)[:, :, ::3]
        assert relative_error(rows[labels >= 0], want_grad) <= 2e-5, f"{name} grad"
        assert not rows[labels < 0].any(), f"{name} grad of a row that does not count"


def test_no_row_counts() -> None:
    out, *grads = run(*logits_pair(2, 70, 1), labels=torch.full((2,), -100), k=3, backend="triton")
    assert out.loss.item() == 0 and not grads[0].any() and not grads[1].any()
    assert topk_tail_kl(torch.randn(0, 9), torch.randn(0, 9), k=3, backend="triton").loss.item() == 0


def test_served_teacher_agrees_with_torch() -> None:
    student, teacher = logits_pair(3, 90, seed=1)
    ids = lowest_id_topk(teacher, 5)
    logprobs = teacher.log_softmax(-1).gather(-1, ids)
    ids[1, 3:], ids[2] = -1, -1
    results = []
    for backend in ("torch", "triton"):
        leaf = student.clone().requires_grad_()
        out = topk_tail_kl(leaf, teacher_topk=(ids, logprobs), labels=ids[:, 0].clamp(min=0), backend=backend)
        out.kl.sum().backward()
        results.append((out.kl.detach(), out.student_mass, out.teacher_mass, out.student_logprob, leaf.grad))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_fused_linear_agrees_with_torch(softcap: float | None) -> None:
    """Tied head with a bias that trains, several chunks, a masked row, margins."""
    hidden, weight, bias = torch.randn(2, 5, 16), torch.randn(150, 16), torch.randn(150)
    options: Any = dict(labels=torch.tensor([1, 2, -100, 4, 149]), privilege_weight=torch.randn(5), k=4)
    options |= dict(chunk_size=3, logit_scale=0.8, logit_softcap=softcap, temperature=1.3)
    results = []
    for backend in ("torch", "triton"):
        leaves = [x.clone().requires_grad_() for x in (hidden[0], weight, hidden[1], bias)]
        out = fused_linear_topk_tail_kl(*leaves[:3], student_bias=leaves[3], backend=backend, **options)
        results.append((out.loss, *torch.autograd.grad(2 * out.loss, leaves)))
        assert out.topk_ids[2].tolist() == [-1] * 4
    for name, a, b in zip(("loss", "student", "weight", "teacher", "bias"), *results, strict=True):
        assert relative_error(b, a) <= 2e-5, name


def test_the_filter_takes_gradients_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device that multiplies halves: kernels write gradients in bf16, the filter gathers their columns."""

    def widened(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, out: Any = None) -> torch.Tensor:
        return torch.mm(a.to(dtype), b.to(dtype), out=out)

    monkeypatch.setattr("lopd_fast.fused_head.HALF_DEVICES", ("cpu",))
    monkeypatch.setattr("lopd_fast.fused_head.multiply_halves", widened)
    monkeypatch.setattr("lopd_fast.scratch.HOSTS", ())
    hidden, weight = torch.randn(2, 5, 16).bfloat16(), torch.randn(700, 16).bfloat16()
    grads = []
    for cut in (None, 1e-3):
        student = hidden[0].clone().requires_grad_()
        out = fused_linear_topk_tail_kl(student, weight, hidden[1], k=4, grad_filter=cut, backend="triton")
        grads += torch.autograd.grad(out.loss, student)
    assert 0 < relative_error(grads[1], grads[0]) < 2e-2


def test_same_bits_twice_and_no_write_to_inputs() -> None:
    student, teacher = logits_pair(2, 130, seed=4)
    before = student.clone(), teacher.clone()
    first, second = (run(student, teacher, k=3, backend="triton") for _ in range(2))
    assert torch.equal(first[0].kl, second[0].kl)
    assert torch.equal(first[1], second[1]) and torch.equal(first[2], second[2])
    assert torch.equal(student, before[0]) and torch.equal(teacher, before[1])


@pytest.mark.parametrize(("dtype", "k"), [(torch.float64, 3), (torch.float32, 128), (torch.float32, 200)])
def test_what_the_kernels_do_not_take_is_computed_by_torch(
    dtype: torch.dtype, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp64 and supports over 127 ids, from logits and fused: the bits of backend="torch"."""
    monkeypatch.setattr("lopd_fast.loss_triton.block_stats", None)  # nothing of the kernels may be called
    student, teacher = logits_pair(2, 200, seed=4, dtype=dtype)
    hidden, weight = torch.randn(2, 3, 8, dtype=dtype), torch.randn(200, 8, dtype=dtype)
    for loss, inputs in (
        (topk_tail_kl, (student, teacher)),
        (fused_linear_topk_tail_kl, (hidden[0], weight, hidden[1])),
    ):
        results = []
        for backend in ("torch", "triton"):
            leaves: Any = [x.clone().requires_grad_() for x in inputs]
            out = loss(*leaves, k=k, backend=backend)
            results.append((out.kl, *torch.autograd.grad(out.loss, leaves)))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_the_largest_support_of_the_kernels() -> None:
    check(*logits_pair(1, 300, seed=6), k=127, labels=torch.tensor([3]), privilege_weight=torch.ones(1))


def test_a_cpu_without_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="needs CUDA tensors, not cpu"):
        topk_tail_kl(torch.randn(1, 5), torch.randn(1, 5), k=2, backend="triton")
