"""grad_filter: the columns of the vocabulary that a hidden gradient may leave to their mean."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from ops.memory import LargestTensor
from ops.oracle import relative_error
from torch import Tensor

from lopd_fast import fused_linear_topk_tail_kl
from lopd_fast.fused_filter import Explicit, GradFilter, Piece

ROWS, WIDTH, HIDDEN = 64, 6000, 64


def peaked_problem(seed: int = 0) -> dict[str, Tensor]:
    """A head whose logits are sharp, with a common direction, as trained heads have one: means matter."""
    generator = torch.Generator().manual_seed(seed)
    weight = 0.8 * torch.randn(WIDTH, HIDDEN, generator=generator) + 0.4 * torch.randn(
        HIDDEN, generator=generator
    )
    # On-policy rows share contexts: their likely ids come from a part of the vocabulary.
    target = weight[torch.randint(0, 200, (ROWS,), generator=generator)]
    student = 0.6 * target + 0.2 * torch.randn(ROWS, HIDDEN, generator=generator)
    teacher = student + 0.5 * torch.randn(ROWS, HIDDEN, generator=generator)
    return dict(student_hidden=student, student_weight=weight, teacher_hidden=teacher)


def run(x: dict[str, Tensor], frozen: bool = False, **options: Any) -> tuple[Tensor, dict[str, Any]]:
    leaves: Any = {
        name: value.clone().requires_grad_(not (frozen and name.endswith("weight")))
        for name, value in x.items()
    }
    generator = torch.Generator().manual_seed(7)
    rows: Any = dict(
        labels=torch.randint(0, 200, (ROWS,), generator=generator),
        token_weight=torch.rand(ROWS, generator=generator) + 0.2,
        privilege_weight=torch.randn(ROWS, generator=generator),
    )
    out = fused_linear_topk_tail_kl(**leaves, k=5, **rows, **options)
    out.loss.backward()
    return out.loss.detach(), {name: leaf.grad for name, leaf in leaves.items()}


def test_none_is_the_exact_gradient() -> None:
    x = peaked_problem()
    loss, grads = run(x)
    same_loss, same = run(x, grad_filter=None)
    assert torch.equal(loss, same_loss)
    assert all(torch.equal(grads[name], same[name]) for name in grads)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("chunk", [None, 16])
@pytest.mark.parametrize("softcap", [None, 120.0])
def test_most_columns_can_go(
    frozen: bool, chunk: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over half of the columns are left out, and hidden gradients move by about what rounding to bf16 costs."""
    monkeypatch.setattr("lopd_fast.fused_tiles.TILE_BYTES", 1)  # several tiles
    kept = []

    def counted(
        this: GradFilter, values: Tensor, pieces: Sequence[Piece], explicit: Explicit
    ) -> Tensor | None:
        assert len(pieces) == (-(-WIDTH // 512) if frozen else 1)
        active = active_columns(this, values, pieces, explicit)
        kept.append(int(active.sum()))
        shares = [this.shares(values, piece, this.limit(values, explicit)) for piece in pieces]
        explicit_ones = torch.zeros(WIDTH, dtype=torch.bool).index_fill(0, explicit.columns.flatten(), True)
        assert torch.equal(this.active(torch.cat(shares), explicit_ones), active)
        return filtered(this, values, pieces, explicit)

    filtered = GradFilter.hidden_gradient
    x = peaked_problem()
    loss, exact = run(x, frozen, chunk_size=chunk, logit_softcap=softcap)
    monkeypatch.setattr(GradFilter, "hidden_gradient", counted)
    filtered_loss, grads = run(x, frozen, chunk_size=chunk, logit_softcap=softcap, grad_filter=1e-5)
    assert 0 < max(kept) < WIDTH / 2
    assert torch.equal(loss, filtered_loss), "the filter is about gradients"
    for name in ("student_hidden", "teacher_hidden"):
        assert relative_error(grads[name], exact[name]) < 8e-3, name
    if not frozen:
        assert torch.equal(grads["student_weight"], exact["student_weight"]), "a head's gradient stays exact"
    # Leaving the columns out without their mean is worse: the correction does its work.
    monkeypatch.setattr(GradFilter, "hidden_gradient", without_the_mean)
    _, plain = run(x, frozen, chunk_size=chunk, logit_softcap=softcap, grad_filter=1e-5)
    for name in ("student_hidden", "teacher_hidden"):
        assert relative_error(grads[name], exact[name]) < 0.6 * relative_error(plain[name], exact[name]), name


def dense(values: Tensor, pieces: Sequence[Piece], explicit: Explicit) -> Tensor:
    """The gradient of the logits that the filter is handed."""
    grad = values.clone()
    for piece in pieces:
        if piece.factor is not None:
            grad[:, piece.columns] *= piece.factor[:, None]
    return grad if explicit.apart is None else grad.scatter_add(1, explicit.columns, explicit.apart)


def active_columns(this: GradFilter, values: Tensor, pieces: Sequence[Piece], explicit: Explicit) -> Tensor:
    """Those that hold an explicit value, or whose |gradients| sum to more than the threshold."""
    grad = dense(values, pieces, explicit)
    largest = grad.gather(1, explicit.columns).abs().max().item()
    limit = this.cut * min(this.scale.item(), largest) * len(grad) ** 0.5
    return (grad.abs().sum(0) > limit).index_fill(0, explicit.columns.flatten(), True)


def without_the_mean(this: GradFilter, values: Tensor, pieces: Sequence[Piece], explicit: Explicit) -> Tensor:
    active = active_columns(this, values, pieces, explicit)
    return dense(values, pieces, explicit)[:, active] @ this.head.weight[active]


def test_too_many_columns_are_the_exact_product() -> None:
    """A threshold of almost 0 keeps all, by tiles (a frozen head) as over the whole vocabulary (one that learns)."""
    x = peaked_problem()
    for frozen in (False, True):
        _, exact = run(x, frozen)
        _, grads = run(x, frozen, grad_filter=1e-30)
        for name in ("student_hidden", "teacher_hidden"):
            assert relative_error(grads[name], exact[name]) < 1e-6, (frozen, name)


def test_a_student_close_to_its_teacher_keeps_its_gradient() -> None:
    """Late in training every |dlogit| is below any fixed threshold; the filter follows the gradient's own size."""
    x = peaked_problem()
    x["teacher_hidden"] = x["student_hidden"] + 1e-4 * torch.randn(ROWS, HIDDEN)
    leaves = {name: value.clone().requires_grad_() for name, value in x.items()}
    grads = {}
    for cut in (None, 1e-5):
        out = fused_linear_topk_tail_kl(**leaves, k=5, grad_filter=cut)  # pyright: ignore[reportArgumentType]
        assert 0 < out.loss.item() < 1e-6
        grads[cut] = torch.autograd.grad(out.loss, (leaves["student_hidden"], leaves["teacher_hidden"]))
    for name, exact, filtered in zip(("student", "teacher"), grads[None], grads[1e-5], strict=True):
        assert relative_error(filtered, exact) < 0.02, name


def test_tighter_is_closer() -> None:
    x = peaked_problem()
    _, exact = run(x)
    errors = []
    for threshold in (1e-3, 1e-4, 1e-5, 1e-6, 0.0):
        _, grads = run(x, grad_filter=threshold)
        errors.append(relative_error(grads["student_hidden"], exact["student_hidden"]))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-5


def test_threshold_is_ahead_of_weights_and_denominator() -> None:
    """The same columns whatever num_items is: gradients scale by it and by nothing else."""
    x = peaked_problem()
    _, one = run(x, grad_filter=1e-4, num_items=1)
    _, many = run(x, grad_filter=1e-4, num_items=2**20)
    for name in one:
        assert relative_error(many[name] * 2**20, one[name]) < 1e-5, name


def test_dense_gradients_cost_no_extra_memory() -> None:
    """A flat model has every column active: the filter steps aside instead of gathering them all."""
    student = torch.randn(16, 8, requires_grad=True)
    weight = 0.01 * torch.randn(5000, 8)
    with LargestTensor() as tracked:
        fused_linear_topk_tail_kl(
            student, weight, torch.randn(16, 8), chunk_size=4, grad_filter=1e-9
        ).loss.backward()
    assert tracked.bytes == 2 * 4 * 5000 * 4


@pytest.mark.parametrize("rows", [0, 2])
def test_no_row_counts(rows: int) -> None:
    hidden = torch.randn(rows, 4, requires_grad=True)
    labels = torch.full((rows,), -100)
    fused_linear_topk_tail_kl(
        hidden, torch.randn(9, 4), hidden, labels=labels, k=2, grad_filter=1e-5
    ).loss.backward()
    assert hidden.grad is not None and not hidden.grad.any()


def test_a_negative_threshold_is_refused() -> None:
    with pytest.raises(ValueError, match="grad_filter=-1"):
        fused_linear_topk_tail_kl(
            torch.randn(2, 4), torch.randn(9, 4), torch.randn(2, 4), k=2, grad_filter=-1.0
        )
