"""The module forms: the functions' numbers, options checked when made."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from lopd_fast import (
    FusedLinearTopKTailKLLoss,
    TopKTailKL,
    TopKTailKLLoss,
    fused_linear_topk_tail_kl,
    topk_tail_kl,
)

ROWS, HIDDEN, WIDTH = (2, 3), 6, 30
OPTIONS: dict[str, Any] = dict(
    k=4, support="student", divergence="jsd", beta=0.3, tail="renormalize", temperature=0.7, ignore_index=-7
)
HEAD: dict[str, Any] = dict(logit_scale=0.5, logit_softcap=5.0, chunk_size=2, grad_filter=1e-9)


def row_tensors() -> dict[str, Any]:
    labels = torch.randint(WIDTH, ROWS)
    labels[0, 1] = -7
    return dict(labels=labels, token_weight=torch.rand(ROWS), privilege_weight=torch.rand(ROWS), num_items=9)


def gradients(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(loss, leaves))


def test_logits_module_is_the_function() -> None:
    """Every option, set off its default, reaches the function: same bits of loss, outputs and gradients."""
    leaves = [torch.randn(*ROWS, WIDTH, requires_grad=True) for _ in range(2)]
    rows = row_tensors()
    want = topk_tail_kl(*leaves, **OPTIONS, **rows)
    labels = rows.pop("labels")
    loss = TopKTailKLLoss(**OPTIONS)(*leaves, labels, **rows)
    outputs = TopKTailKLLoss(**OPTIONS, return_outputs=True)(*leaves, labels, **rows)
    assert isinstance(loss, Tensor) and isinstance(outputs, TopKTailKL)
    assert torch.equal(loss, want.loss) and torch.equal(outputs.kl, want.kl)
    for got, wanted in zip(gradients(loss, leaves), gradients(want.loss, leaves), strict=True):
        assert torch.equal(got, wanted)


def test_fused_module_is_the_function() -> None:
    hidden = [torch.randn(*ROWS, HIDDEN, requires_grad=True) for _ in range(2)]
    heads = [torch.randn(WIDTH, HIDDEN, requires_grad=True) for _ in range(2)]
    biases = [torch.randn(WIDTH, requires_grad=True) for _ in range(2)]
    leaves = [hidden[0], heads[0], hidden[1], heads[1]]
    rows = row_tensors() | dict(student_bias=biases[0], teacher_bias=biases[1])
    want = fused_linear_topk_tail_kl(*leaves, **OPTIONS, **HEAD, **rows)
    labels = rows.pop("labels")
    loss = FusedLinearTopKTailKLLoss(**OPTIONS, **HEAD)(*leaves, labels, **rows)
    assert torch.equal(loss, want.loss)
    everything = [*leaves, *biases]
    for got, wanted in zip(gradients(loss, everything), gradients(want.loss, everything), strict=True):
        assert torch.equal(got, wanted)
    outputs = FusedLinearTopKTailKLLoss(**OPTIONS, **HEAD, return_outputs=True)(*leaves, labels, **rows)
    assert torch.equal(outputs.topk_ids, want.topk_ids)


def test_served_teacher_and_defaults() -> None:
    student = torch.randn(2, WIDTH)
    served = torch.tensor([[1, 2], [3, -1]]), torch.tensor([[-1.0, -2.0], [-0.5, -torch.inf]])
    want = topk_tail_kl(student, teacher_topk=served)
    assert torch.equal(TopKTailKLLoss()(student, teacher_topk=served), want.loss)
    hidden, weight = torch.randn(2, HIDDEN), torch.randn(WIDTH, HIDDEN)
    want = fused_linear_topk_tail_kl(hidden, weight, hidden + 1)
    assert torch.equal(FusedLinearTopKTailKLLoss()(hidden, weight, hidden + 1), want.loss)


def test_module_manners() -> None:
    """No parameters or state; copies; says its options."""
    module = copy.deepcopy(FusedLinearTopKTailKLLoss(k=7, logit_softcap=30.0))
    assert not list(module.parameters()) and not module.state_dict()
    assert "k=7" in repr(module) and "logit_softcap=30.0" in repr(module)


@pytest.mark.parametrize("module", [TopKTailKLLoss, FusedLinearTopKTailKLLoss])
@pytest.mark.parametrize(
    "option, sentence",
    [
        (dict(k=0), "k=0 must be at least 1"),
        (dict(divergence="kl"), "'kl'.*reverse_kl"),
        (dict(tail="none"), "'none'.*bucket"),
        (dict(divergence="jsd", beta=1.0), "beta=1"),
        (dict(temperature=0.0), "temperature=0"),
        (dict(backend="cuda"), "'cuda'"),
    ],
)
def test_options_are_refused_when_the_module_is_made(module: Any, option: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        module(**option)


def test_head_options_are_refused_when_the_module_is_made() -> None:
    with pytest.raises(ValueError, match="logit_softcap=0"):
        FusedLinearTopKTailKLLoss(logit_softcap=0.0)
