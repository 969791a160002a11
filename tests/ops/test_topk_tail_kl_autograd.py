"""How topk_tail_kl behaves as a differentiable function: upstream gradients, graphs, memory, refusals."""

from typing import Any

import pytest
import torch
from ops.memory import LargestTensor
from ops.oracle import expected, peaked, relative_error
from torch import Tensor

from lopd_fast import topk_tail_kl

LABELS = torch.tensor([3, -100, 0, 39])


@pytest.fixture
def pair() -> tuple[Tensor, Tensor]:
    student = peaked(4, 40, seed=1).float().requires_grad_()
    teacher = peaked(4, 40, seed=2).float().requires_grad_()
    return student, teacher


def gradients(outputs: Tensor, *inputs: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(outputs, inputs))


def oracle_gradients(pair: tuple[Tensor, Tensor], head: Any, **options: Any) -> list[Tensor]:
    leaves = [x.detach().double().requires_grad_() for x in pair]
    return gradients(head(expected(*leaves, **options)), *leaves)


UPSTREAM = {
    "stride 0": lambda out: out.kl.sum(),
    "weights": lambda out: (out.kl * torch.tensor([1.0, 2.0, -0.5, 3.0])).sum(),
    "cat": lambda out: torch.cat([out.kl, out.kl]).sum(),
    "tanh": lambda out: (0.1 * out.kl).tanh().sum(),
    "one row": lambda out: out.kl[2],
    "loss and kl": lambda out: out.loss.square() + out.kl.mean(),
}


@pytest.mark.parametrize("upstream", UPSTREAM.values(), ids=UPSTREAM.keys())
def test_kl_takes_any_upstream_gradient(pair, upstream) -> None:
    got = gradients(upstream(topk_tail_kl(*pair, k=5)), *pair)
    want = oracle_gradients(pair, upstream, k=5)
    assert relative_error(got[0], want[0]) < 2e-5, "student"
    assert relative_error(got[1], want[1]) < 2e-5, "teacher"


PRIVILEGE = {
    "stride 0": lambda out: out.privilege.sum(),
    "weights": lambda out: (out.privilege * torch.tensor([1.0, 2.0, -0.5, 3.0])).sum(),
    "margin of a mean": lambda out: (
        0.05 - (out.privilege * torch.tensor([1.0, 0.0, -1.0, 1.0])).mean()
    ).square(),
    "with kl and loss": lambda out: out.privilege[[0, 2, 3]].sum() + 2 * out.kl[[0, 2, 3]].sum() + out.loss,
}


@pytest.mark.parametrize("upstream", PRIVILEGE.values(), ids=PRIVILEGE.keys())
def test_privilege_takes_any_upstream_gradient(pair, upstream) -> None:
    """The label's log-ratio reaches the teacher alone; the row that does not count reads 0."""

    def head(out: Any) -> Tensor:
        out.privilege = out.privilege.masked_fill(LABELS == -100, 0)
        return upstream(out)

    options: Any = dict(labels=LABELS, privilege_weight=torch.tensor([0.3, 1.0, -2.0, 0.0]), k=5)
    leaves = [x.detach().clone().requires_grad_() for x in pair]
    got = torch.autograd.grad(upstream(topk_tail_kl(*leaves, **options)), leaves, allow_unused=True)
    want_leaves = [x.detach().double().requires_grad_() for x in pair]
    want = torch.autograd.grad(head(expected(*want_leaves, **options)), want_leaves, allow_unused=True)
    assert got[1] is not None and relative_error(got[1], want[1]) < 2e-5, "teacher"
    if want[0] is not None and want[0].any():
        assert got[0] is not None and relative_error(got[0], want[0]) < 2e-5, "student"
    else:
        assert got[0] is None or not got[0].any(), "student"


def test_backward_twice_and_inputs_untouched(pair) -> None:
    before = [x.detach().clone() for x in pair]
    out = topk_tail_kl(*pair, labels=LABELS, privilege_weight=torch.ones(4), k=5)
    loss = (0.7 * out.loss).tanh()
    first = torch.autograd.grad(loss, pair, retain_graph=True)
    second = torch.autograd.grad(loss, pair)
    for name, x, was, a, b in zip(("student", "teacher"), pair, before, first, second, strict=True):
        assert torch.equal(x.detach(), was), f"{name} logits were written to"
        assert torch.equal(a, b), f"{name} gradient of a second backward"


def test_an_auxiliary_loss_shares_the_logits(pair) -> None:
    student, teacher = pair
    (topk_tail_kl(student, teacher, k=5).loss + student.logsumexp(-1).square().mean()).backward()
    leaves = [x.detach().double().requires_grad_() for x in pair]
    (expected(*leaves, k=5).loss + leaves[0].logsumexp(-1).square().mean()).backward()
    assert leaves[0].grad is not None and student.grad is not None
    assert relative_error(student.grad, leaves[0].grad) < 2e-5


@pytest.mark.parametrize("wants", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference"])
def test_same_value_whoever_wants_a_gradient(pair, wants: tuple[bool, bool], mode: str) -> None:
    options: Any = dict(labels=LABELS, privilege_weight=torch.ones(4), k=5)
    whole = topk_tail_kl(*pair, **options)
    student, teacher = (x.detach().requires_grad_(want) for x, want in zip(pair, wants, strict=True))
    if mode == "grad":
        got = topk_tail_kl(student, teacher, **options)
        if any(wants):
            got.loss.backward()
        for x, full, want in zip((student, teacher), gradients(whole.loss, *pair), wants, strict=True):
            assert (x.grad is not None) == want
            assert x.grad is None or torch.equal(x.grad, full)
    else:
        with torch.no_grad() if mode == "no_grad" else torch.inference_mode():
            got = topk_tail_kl(student, teacher, **options)
        assert not got.loss.requires_grad
    assert torch.equal(got.loss, whole.loss) and torch.equal(got.kl, whole.kl)


@pytest.mark.parametrize("rows", [0, 3])
def test_no_row_counts(rows: int) -> None:
    student, teacher = torch.randn(rows, 9, requires_grad=True), torch.randn(rows, 9, requires_grad=True)
    nothing: list[Any] = [dict(labels=torch.full((rows,), -100)), dict(token_weight=torch.zeros(rows))]
    for options in nothing:
        student.grad = teacher.grad = None
        out = topk_tail_kl(student, teacher, k=3, **options)
        (out.loss + out.kl.sum()).backward()
        assert out.loss.item() == 0
        assert student.grad is not None and torch.equal(student.grad, torch.zeros(rows, 9)), "student"
        assert teacher.grad is not None and torch.equal(teacher.grad, torch.zeros(rows, 9)), "teacher"
        assert (out.topk_ids == -1).all()


def test_nan_in_rows_that_do_not_count(pair) -> None:
    """Masking happens ahead of the arithmetic: NaN and -inf rows, and NaN weights, leave no trace."""
    student, teacher = (x.detach().clone() for x in pair)
    student[1], teacher[1] = float("nan"), float("-inf")
    student.requires_grad_()
    teacher.requires_grad_()
    weights = torch.tensor([1.0, float("nan"), 0.5, 2.0])
    got = topk_tail_kl(student, teacher, labels=LABELS, token_weight=weights, privilege_weight=weights, k=5)
    got.loss.backward()
    clean: Any = dict(
        labels=LABELS, token_weight=weights.nan_to_num(), privilege_weight=weights.nan_to_num(), k=5
    )
    want = topk_tail_kl(*pair, **clean)
    assert torch.equal(got.loss, want.loss)
    for x, full in zip((student, teacher), gradients(want.loss, *pair), strict=True):
        assert x.grad is not None and torch.equal(x.grad, full)
        assert not x.grad[1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_the_gradients_and_a_chunk(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Beyond the gradients themselves, in their own dtype, no tensor holds more than a chunk of logits."""
    rows, width, chunk = 256, 4096, 16
    monkeypatch.setattr("lopd_fast.loss_torch.SCRATCH_BYTES", {"cpu": chunk * width * 4})
    student = torch.randn(rows, width, dtype=dtype, requires_grad=True)
    teacher = torch.randn(rows, width, dtype=dtype, requires_grad=True)
    with LargestTensor() as forward:
        out = topk_tail_kl(student, teacher, k=4)
    assert forward.bytes <= chunk * width * 4, "forward"
    with LargestTensor(ignore=(rows, width, dtype)) as backward:
        out.loss.backward()
    assert backward.bytes <= chunk * width * 4, "backward"
    assert backward.ignored == {(rows, width, dtype)}, "the gradients in the dtype of the logits"


@pytest.mark.parametrize("bad", [0, -1, 6, 2.0, True])
def test_k_out_of_range(bad: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="k="):
        topk_tail_kl(torch.randn(2, 5), torch.randn(2, 5), k=bad)
