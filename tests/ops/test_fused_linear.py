"""fused_linear_topk_tail_kl against the plain formula on fp64 logits: values, and the gradient of every input."""

from itertools import product
from typing import Any

import pytest
import torch
from ops.oracle import expected, relative_error
from torch import Tensor

from lopd_fast import TopKTailKL, fused_linear_topk_tail_kl, topk_tail_kl

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


def leaves_of(x: dict[str, Tensor]) -> dict[str, Any]:
    return {name: value.detach().clone().requires_grad_() for name, value in x.items()}


def row_options(masked: bool = True) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, WIDTH, (ROWS,), generator=generator)
    weight = torch.rand(ROWS, generator=generator) + 0.1
    if masked:
        labels[2], weight[7] = -100, 0
    return dict(
        labels=labels, token_weight=weight, privilege_weight=torch.randn(ROWS, generator=generator), k=4
    )


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
        assert leaf.grad is not None and leaf.grad.dtype == leaf.dtype, name
        error = relative_error(leaf.grad, grads[name])
        assert error < tolerance, f"gradient of {name}: relative error {error:.2e}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("scale", "cap"), [(1.0, None), (0.25, None), (1.3, 5.0)])
def test_heads(dtype: torch.dtype, tied: bool, bias: bool, scale: float, cap: float | None) -> None:
    """Tied or own, with bias, logit scale (Cohere, Granite) and soft-cap (Gemma 2), in chunks that do not divide N."""
    x = inputs(dtype, tied, bias)
    want, grads = oracle_gradients(x, scale, cap, temperature=0.8, **row_options())
    leaves = leaves_of(x)
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
def test_every_divergence(divergence: str, tail: str, support: str) -> None:
    x = inputs(torch.float32, tied=True, bias=False)
    options: Any = dict(divergence=divergence, beta=0.3, tail=tail, support=support, **row_options())
    want, grads = oracle_gradients(x, **options)
    leaves = leaves_of(x)
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
        assert leaf.grad is None or torch.equal(leaf.grad, full[name].grad), name


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


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16, torch.float16])
def test_mixed_precision(autocast: torch.dtype | None, hidden: torch.dtype, weight: torch.dtype) -> None:
    """Operands are rounded as autocast would; the loss is fp32 and each gradient has the dtype of its tensor."""
    x = inputs(torch.float32, tied=True, bias=True)
    x = {name: value.to(hidden if "hidden" in name else weight) for name, value in x.items()}
    leaves = leaves_of(x)
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        out = fused_linear_topk_tail_kl(**leaves, chunk_size=4, **row_options())
        (UPSTREAM * out.loss).backward()
    rounded = x if autocast is None else {n: v if "bias" in n else v.to(autocast) for n, v in x.items()}
    want, grads = oracle_gradients(rounded, **row_options())
    check(out, leaves, want, grads, FP32 if hidden == weight == torch.float32 and autocast is None else BF16)


def test_fp16_gradients_survive_until_the_loss_is_scaled() -> None:
    """One row in 2^20 has gradients far below the smallest fp16; a scaler's factor brings them back."""
    x = inputs(torch.float16, tied=True, bias=False)
    leaves = leaves_of(x)
    out = fused_linear_topk_tail_kl(**leaves, num_items=2**24, **row_options())
    (2**16 * out.loss).backward()
    want, grads = oracle_gradients(x, num_items=2**24, **row_options())
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        assert relative_error(leaf.grad, grads[name] * 2**16 / UPSTREAM) < BF16, name


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
    from lopd_fast.fused_head import Head

    project = Head.project
    monkeypatch.setattr(
        Head, "project", lambda self, hidden, out: (seen.append(len(hidden)), project(self, hidden, out))
    )
    out = fused_linear_topk_tail_kl(**dirty, labels=labels, k=3)
    out.loss.backward()
    assert seen == [ROWS // 2, ROWS // 2]
    assert torch.equal(out.loss, want.loss)
    for name, leaf in dirty.items():
        assert torch.equal(leaf.grad, leaves[name].grad), name


@pytest.mark.parametrize("width", [1, 2, 31, 127, 129, 1025])
def test_vocabulary_sizes(width: int) -> None:
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
    leaves = leaves_of(x)
    out = fused_linear_topk_tail_kl(**leaves, **options)
    (UPSTREAM * out.loss).backward()
    want, grads = oracle_gradients(x, **options)
    assert abs(out.loss.item() - want.loss.item()) <= FP32 * max(1.0, abs(want.loss.item()))
    for name, leaf in leaves.items():
        if width == 1:
            assert not leaf.grad.any(), name
        else:
            assert relative_error(leaf.grad, grads[name]) < FP32, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_student_is_teacher(dtype: torch.dtype) -> None:
    """Equal hidden states under one head: exactly 0, whatever a product does with rows at different places in it."""
    hidden = torch.randn(37, HIDDEN).to(dtype)
    weight = torch.randn(5003, HIDDEN).to(dtype).requires_grad_()
    student, teacher = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    out = fused_linear_topk_tail_kl(student, weight, teacher, chunk_size=16)
    out.loss.backward()
    assert out.loss.item() == 0
    for name, leaf in (("student", student), ("teacher", teacher), ("weight", weight)):
        assert leaf.grad is not None and not leaf.grad.any(), name


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
