"""Hidden states and heads for the tests of the fused loss, and what the oracle makes of them."""

from typing import Any

import torch
from ops.oracle import expected
from torch import Tensor

FP32 = 2e-5
BF16 = 6e-3
ROWS, WIDTH, HIDDEN, TEACHER_HIDDEN = 11, 300, 24, 16
UPSTREAM = 2.5


def inputs(dtype: torch.dtype, tied: bool, bias: bool, seed: int = 5) -> dict[str, Tensor]:
    """Hidden states and heads with peaked logits; the two hidden sizes differ when the heads do."""
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)

    teacher_size = HIDDEN if tied else TEACHER_HIDDEN
    made = dict(student_hidden=make(ROWS, HIDDEN), student_weight=make(WIDTH, HIDDEN, scale=0.7))
    made["teacher_hidden"] = make(ROWS, teacher_size)
    if tied:
        made["teacher_hidden"] = (made["student_hidden"] + 0.7 * made["teacher_hidden"]).to(dtype)
    else:
        made["teacher_weight"] = make(WIDTH, teacher_size, scale=0.8)
    if bias:
        made["student_bias"] = make(WIDTH)
        if not tied:
            made["teacher_bias"] = make(WIDTH)
    return made


def oracle_logits(x: dict[str, Tensor], scale: float, cap: float | None) -> tuple[Tensor, Tensor]:
    def side(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        logits = hidden @ weight.T
        if bias is not None:
            logits = logits + bias
        logits = scale * logits
        return logits if cap is None else cap * torch.tanh(logits / cap)

    tied = "teacher_weight" not in x
    student = side(x["student_hidden"], x["student_weight"], x.get("student_bias"))
    weight, bias = (
        (x["student_weight"], x.get("student_bias")) if tied else (x["teacher_weight"], x.get("teacher_bias"))
    )
    return student, side(x["teacher_hidden"], weight, bias)


def oracle_gradients(
    x: dict[str, Tensor], scale: float = 1.0, cap: float | None = None, **options: Any
) -> tuple[Any, dict[str, Any]]:
    """The expected outputs and the gradients of UPSTREAM * loss, in fp64 at the rounded inputs."""
    leaves = {name: value.detach().double().requires_grad_() for name, value in x.items()}
    want = expected(*oracle_logits(leaves, scale, cap), **options)
    (UPSTREAM * want.loss).backward()
    return want, {name: leaf.grad for name, leaf in leaves.items()}


def leaves_of(x: dict[str, Tensor], frozen_heads: bool = False) -> dict[str, Any]:
    learn = {name: "hidden" in name or not frozen_heads for name in x}
    return {name: value.detach().clone().requires_grad_(learn[name]) for name, value in x.items()}


def row_options(masked: bool = True) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, WIDTH, (ROWS,), generator=generator)
    weight = torch.rand(ROWS, generator=generator) + 0.1
    if masked:
        labels[2], weight[7] = -100, 0
    return dict(
        labels=labels, token_weight=weight, privilege_weight=torch.randn(ROWS, generator=generator), k=4
    )
