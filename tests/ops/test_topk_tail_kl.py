"""topk_tail_kl against the plain formula in fp64: every output, both gradients, over the grid of options."""

from itertools import product
from typing import Any

import pytest
import torch
from ops.oracle import expected, peaked, relative_error
from torch import Tensor

from lopd_fast import TopKTailKL, topk_tail_kl

FP32 = 2e-5
BF16 = 6e-3
DIVERGENCES = ("reverse_kl", "forward_kl", "jsd")
TAILS = ("bucket", "renormalize", "drop")


def logits_pair(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Peaked student and teacher logits that agree about as much as two checkpoints of one model do."""
    student = peaked(*shape, seed=seed)
    teacher = 0.6 * student + 0.6 * peaked(*shape, seed=seed + 1)
    return student.to(dtype).requires_grad_(), teacher.to(dtype).requires_grad_()


def fp64_leaf(x: Tensor) -> Tensor:
    return x.detach().double().requires_grad_()


def assert_close(actual: Tensor | None, wanted: Tensor | None, tolerance: float, name: str) -> None:
    assert actual is not None and wanted is not None, f"{name} is None"
    error = relative_error(actual, wanted)
    assert error <= tolerance, f"{name}: relative error {error:.2e} > {tolerance:.0e}"


def compare(
    student: Tensor, teacher: Tensor, tolerance: float, outputs_tolerance: float = FP32, **options: Any
) -> TopKTailKL:
    """Checks loss, outputs and both gradients, with an upstream gradient that is not 1."""
    student64, teacher64 = fp64_leaf(student), fp64_leaf(teacher)
    want = expected(student64, teacher64, **options)
    got = topk_tail_kl(student, teacher, **options)
    (3.0 * got.loss).backward()
    (3.0 * want.loss).backward()

    counts = torch.ones_like(want.kl, dtype=torch.bool)
    if options.get("labels") is not None:
        counts = options["labels"] != options.get("ignore_index", -100)
    if options.get("token_weight") is not None:
        counts = counts & (options["token_weight"] != 0)
    # The loss may be small by cancellation between rows: it is held to the size of its terms.
    scale = float(want.kl.detach().abs().mean())
    assert abs(got.loss.item() - want.loss.item()) <= outputs_tolerance * max(scale, abs(want.loss.item())), (
        "loss"
    )
    assert_close(got.kl[counts], want.kl[counts], outputs_tolerance, "kl")
    assert_close(got.student_mass[counts], want.student_mass[counts], outputs_tolerance, "student_mass")
    assert_close(got.teacher_mass[counts], want.teacher_mass[counts], outputs_tolerance, "teacher_mass")
    assert torch.equal(got.topk_ids[counts], want.topk_ids[counts]), "topk_ids"
    if options.get("labels") is None:
        assert got.privilege is None and got.student_logprob is None and got.teacher_logprob is None
    else:
        assert got.privilege is not None and want.privilege is not None
        assert got.student_logprob is not None and want.student_logprob is not None
        assert got.teacher_logprob is not None and want.teacher_logprob is not None
        assert_close(got.privilege[counts], want.privilege[counts], outputs_tolerance, "privilege")
        assert_close(
            got.student_logprob[counts], want.student_logprob[counts], outputs_tolerance, "student_logprob"
        )
        assert_close(
            got.teacher_logprob[counts], want.teacher_logprob[counts], outputs_tolerance, "teacher_logprob"
        )
    assert student.grad is not None and student.grad.dtype == student.dtype, "student grad dtype"
    assert teacher.grad is not None and teacher.grad.dtype == teacher.dtype, "teacher grad dtype"
    assert_close(student.grad, student64.grad, tolerance, "student grad")
    assert_close(teacher.grad, teacher64.grad, tolerance, "teacher grad")
    assert not got.kl[~counts].any(), "kl of a row that does not count"
    assert not student.grad[~counts].any(), "student grad of a row that does not count"
    assert not teacher.grad[~counts].any(), "teacher grad of a row that does not count"
    return got


@pytest.mark.parametrize("support", ["teacher", "student"])
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_every_divergence(support: str, divergence: str, tail: str, temperature: float) -> None:
    student, teacher = logits_pair(7, 507, seed=3)
    labels = torch.randint(0, 507, (7,))
    labels[4] = -100
    token_weight = torch.rand(7)
    token_weight[1] = 0
    compare(
        student,
        teacher,
        FP32,
        labels=labels,
        token_weight=token_weight,
        privilege_weight=torch.randn(7),
        k=5,
        support=support,
        divergence=divergence,
        beta=0.3,
        tail=tail,
        temperature=temperature,
    )


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_jsd_mixture(beta: float) -> None:
    compare(*logits_pair(6, 252, seed=11), FP32, divergence="jsd", beta=beta, k=9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("divergence", "tail"), list(product(DIVERGENCES, TAILS)))
def test_half_precision(dtype: torch.dtype, divergence: str, tail: str) -> None:
    """The arithmetic is fp32, so outputs are as good as in fp32 and gradients are rounded once."""
    student, teacher = logits_pair(5, 252, seed=21, dtype=dtype)
    labels = torch.randint(0, 252, (5,))
    compare(
        student,
        teacher,
        BF16,
        labels=labels,
        privilege_weight=torch.randn(5),
        k=7,
        divergence=divergence,
        tail=tail,
    )


@pytest.mark.parametrize("width", [1, 2, 31, 127, 129, 1000, 1025, 1281, 4099])
@pytest.mark.parametrize("k", [1, 20, 10**9])
def test_vocabulary_sizes(width: int, k: int) -> None:
    """Widths off the block size, k from 1 to V."""
    student, teacher = logits_pair(3, width, seed=width)
    got = topk_tail_kl(student, teacher, k=min(k, width))
    want = expected(fp64_leaf(student), fp64_leaf(teacher), k=min(k, width))
    assert torch.equal(got.topk_ids, want.topk_ids), "topk_ids"
    if width > 1:
        student.grad = teacher.grad = None
        compare(student, teacher, FP32, k=min(k, width))
    else:
        assert float(got.loss.detach()) == 0, "one id leaves nothing to diverge"


@pytest.mark.parametrize("width", [129_920, 151_936])
def test_real_vocabularies(width: int) -> None:
    compare(
        *logits_pair(2, width, seed=5),
        FP32,
        labels=torch.tensor([0, width - 1]),
        privilege_weight=torch.ones(2),
    )


@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (2, 1, 3)])
def test_leading_dimensions(shape: tuple[int, ...]) -> None:
    student, teacher = logits_pair(*shape, 61, seed=8)
    labels = torch.randint(0, 61, shape)
    got = compare(student, teacher, FP32, labels=labels, token_weight=torch.rand(shape) + 0.1, k=3)
    assert got.kl.shape == shape and got.topk_ids.shape == (*shape, 3)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.transpose(0, 1),
        lambda x: x[:, 1:],
        lambda x: x[..., :90],
        lambda x: x[:, ::2],
        lambda x: x[..., ::3],
        lambda x: x.permute(2, 0, 1),
        lambda x: x[:1].expand(3, -1, -1),
    ],
    ids=["transpose", "shifted", "sliced_vocab", "every_second", "strided_vocab", "vocab_first", "expanded"],
)
@pytest.mark.parametrize("masked", [False, True])
def test_strides(view, masked: bool) -> None:
    """Non-contiguous logits, with and without rows to drop: as their contiguous copies."""
    base_student, base_teacher = logits_pair(4, 6, 100, seed=2)
    student, teacher = view(base_student), view(base_teacher)
    labels = torch.randint(0, student.shape[-1], student.shape[:-1])
    if masked:
        labels.view(-1)[::3] = -100
    options: Any = dict(labels=labels, privilege_weight=torch.randn(labels.shape), k=3)
    got = topk_tail_kl(student, teacher, **options)
    got.loss.backward()
    base_student64, base_teacher64 = fp64_leaf(base_student), fp64_leaf(base_teacher)
    want = expected(view(base_student64), view(base_teacher64), **options)
    want.loss.backward()
    assert_close(got.loss, want.loss, FP32, "loss")
    assert_close(base_student.grad, base_student64.grad, FP32, "student grad")
    assert_close(base_teacher.grad, base_teacher64.grad, FP32, "teacher grad")


def test_chunks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    student, teacher = logits_pair(13, 300, seed=4)
    whole = topk_tail_kl(student, teacher, labels=torch.arange(13), privilege_weight=torch.randn(13), k=4)
    whole.kl.square().sum().backward()
    grads = student.grad, teacher.grad
    student.grad = teacher.grad = None
    monkeypatch.setattr("lopd_fast.loss_torch.SCRATCH_BYTES", {"cpu": 3 * 300 * 4})
    monkeypatch.setattr("lopd_fast.loss_rows.CACHE_BYTES", 2 * 300 * 4)
    parts = topk_tail_kl(student, teacher, labels=torch.arange(13), k=4)
    parts.kl.square().sum().backward()
    assert torch.equal(parts.kl, whole.kl), "kl"
    assert torch.equal(parts.topk_ids, whole.topk_ids), "topk_ids"
    assert student.grad is not None and grads[0] is not None and torch.equal(student.grad, grads[0]), (
        "student grad"
    )
    assert teacher.grad is not None and grads[1] is not None and torch.equal(teacher.grad, grads[1]), (
        "teacher grad"
    )


@pytest.mark.parametrize(("divergence", "tail"), list(product(DIVERGENCES, TAILS)))
def test_gradcheck(divergence: str, tail: str) -> None:
    """fp64 stays fp64: numerical derivatives of loss, kl and privilege."""
    student, teacher = logits_pair(3, 13, seed=6, dtype=torch.float64)
    labels = torch.tensor([2, -100, 12])

    def kl(s: Tensor, t: Tensor) -> Tensor:
        return topk_tail_kl(s, t, k=3, divergence=divergence, tail=tail).kl

    def privilege(t: Tensor) -> Tensor:
        out = topk_tail_kl(
            student.detach(), t, labels=labels, k=3, divergence=divergence, tail=tail
        ).privilege
        assert out is not None
        return out

    assert topk_tail_kl(student, teacher, k=3).loss.dtype == torch.float64
    assert torch.autograd.gradcheck(kl, (student, teacher))
    assert torch.autograd.gradcheck(privilege, (teacher,))
