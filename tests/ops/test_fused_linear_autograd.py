"""How the fused loss behaves as a differentiable function: who gets a gradient, twice, of no rows, of no waste."""

from itertools import product
from typing import Any

import pytest
import torch
from ops.heads import FP32, ROWS, UPSTREAM, inputs, leaves_of, oracle_gradients, row_options
from ops.oracle import relative_error

from lopd_fast import fused_linear_topk_tail_kl
from lopd_fast.fused_head import Head


@pytest.mark.parametrize("wants", list(product([False, True], repeat=4)))
def test_whoever_wants_a_gradient_gets_it(wants: tuple[bool, ...]) -> None:
    """Every combination of trainable hidden states and heads: same value, same gradients, None for the others."""
    x = inputs(torch.float32, tied=False, bias=False)
    full = leaves_of(x)
    whole = fused_linear_topk_tail_kl(**full, chunk_size=4, **row_options())
    whole.loss.backward()
    leaves: Any = {
        name: value.requires_grad_(want) for (name, value), want in zip(x.items(), wants, strict=True)
    }
    out = fused_linear_topk_tail_kl(**leaves, chunk_size=4, **row_options())
    assert torch.equal(out.loss, whole.loss) and out.loss.requires_grad == any(wants)
    if any(wants):
        out.loss.backward()
    for (name, leaf), want in zip(leaves.items(), wants, strict=True):
        assert (leaf.grad is not None) == want, name
        assert leaf.grad is None or relative_error(leaf.grad, full[name].grad) < 1e-6, name


@pytest.mark.parametrize("wants", list(product([False, True], repeat=3)))
def test_tied_head_with_parts_frozen(wants: tuple[bool, ...]) -> None:
    x = inputs(torch.float32, tied=True, bias=False)
    _, grads = oracle_gradients(x, **row_options())
    leaves: Any = {
        name: value.requires_grad_(want) for (name, value), want in zip(x.items(), wants, strict=True)
    }
    out = fused_linear_topk_tail_kl(**leaves, chunk_size=4, **row_options())
    if any(wants):
        (UPSTREAM * out.loss).backward()
    for (name, leaf), want in zip(leaves.items(), wants, strict=True):
        assert (leaf.grad is not None) == want, name
        assert leaf.grad is None or relative_error(leaf.grad, grads[name]) < FP32, name


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_autograd(mode: Any) -> None:
    leaves = leaves_of(inputs(torch.float32, tied=True, bias=False))
    whole = fused_linear_topk_tail_kl(**leaves, **row_options())
    with mode():
        out = fused_linear_topk_tail_kl(**leaves, **row_options())
    assert torch.equal(out.loss, whole.loss) and torch.equal(out.kl, whole.kl) and not out.loss.requires_grad


def test_backward_twice_and_inputs_untouched() -> None:
    x = inputs(torch.float32, tied=False, bias=True)
    leaves = leaves_of(x)
    out = fused_linear_topk_tail_kl(**leaves, chunk_size=4, **row_options())
    loss = (0.3 * out.loss).tanh()
    first = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True)
    second = torch.autograd.grad(loss, list(leaves.values()))
    for name, a, b in zip(leaves, first, second, strict=True):
        assert torch.equal(a, b), f"gradient of {name} in a second backward"
        assert torch.equal(leaves[name].detach(), x[name]), f"{name} was written to"
    plain = fused_linear_topk_tail_kl(**leaves, chunk_size=4, **row_options())
    slope = 0.3 * (1 - (0.3 * plain.loss.detach()).tanh() ** 2)
    for name, a, b in zip(leaves, first, torch.autograd.grad(plain.loss, list(leaves.values())), strict=True):
        assert torch.allclose(a, slope * b, rtol=1e-6), f"gradient of {name} scales with its upstream"


@pytest.mark.parametrize("rows", [0, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_no_row_counts(rows: int, tied: bool) -> None:
    x = inputs(torch.float32, tied, bias=True)
    leaves = leaves_of({name: value[:rows] if "hidden" in name else value for name, value in x.items()})
    for masked in (dict(labels=torch.full((rows,), -100)), dict(token_weight=torch.zeros(rows))):
        for leaf in leaves.values():
            leaf.grad = None
        options: Any = masked
        out = fused_linear_topk_tail_kl(**leaves, k=3, **options)
        out.loss.backward()
        assert out.loss.item() == 0
        for name, leaf in leaves.items():
            assert leaf.grad is not None and torch.equal(leaf.grad, torch.zeros_like(leaf)), name


def test_rows_that_do_not_count_are_not_projected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the rows masked: half the rows reach the products, and NaN in the rest leaves no trace."""
    x = inputs(torch.float32, tied=True, bias=False)
    labels = torch.arange(ROWS)
    labels[::2] = -100
    leaves = leaves_of(x)
    want = fused_linear_topk_tail_kl(**leaves, labels=labels, k=3)
    want.loss.backward()
    x["student_hidden"][::2] = float("nan")
    x["teacher_hidden"][::2] = float("inf")
    dirty = leaves_of(x)
    seen = []
    project = Head.project
    monkeypatch.setattr(
        Head, "project", lambda self, hidden, *rest: (seen.append(len(hidden)), project(self, hidden, *rest))
    )
    out = fused_linear_topk_tail_kl(**dirty, labels=labels, k=3)
    out.loss.backward()
    assert seen == [ROWS // 2, ROWS // 2]
    assert torch.equal(out.loss, want.loss)
    for name, leaf in dirty.items():
        assert torch.equal(leaf.grad, leaves[name].grad), name
