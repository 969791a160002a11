"""The top-k-plus-tail divergence between a student and a teacher, from logits or fused with the output heads.

For row n with student logits z and teacher logits u, s = log-softmax(z / temperature), t = log-softmax(u /
temperature), S the support and a tail bucket for every id outside it (paper "Latent On-Policy Self-Distillation",
arXiv 2608.13040, eqs. 9-13):

    D_n     = sum over S and the tail of q (s - t)        q = e^s; other divergences: see `topk_tail_kl`
    delta_n = t_a - s_a                                   a the label; s is held constant
    loss    = sum_n w_n (D_n - v_n delta_n) / Z           Z = num_items, else the sum of w
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from lopd_fast import loss_checks as checks
from lopd_fast.fused_head import Projection
from lopd_fast.fused_linear import FusedLinearLoss
from lopd_fast.logits_loss import LogitsLoss
from lopd_fast.loss_backend import uses_triton
from lopd_fast.loss_rows import LossOptions, RowOutputs
from lopd_fast.loss_support import VocabShard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


Function = TypeVar("Function", bound=Callable[..., Any])


def _graph_break(function: Function) -> Function:
    """torch.compile runs `function` as it is: the row maths is in place, and its shapes follow the mask."""
    return cast(Function, torch.compiler.disable(function))


@dataclass(frozen=True)
class TopKTailKL:
    """What the loss functions return. Shapes (...,) are those of the rows; fp32, or fp64 for fp64 inputs.

    Rows that do not count (label ignore_index, or token weight 0) hold 0, and -1 in topk_ids.
    """

    loss: Tensor  # () differentiable
    kl: Tensor  # (...,) D_n; differentiable in topk_tail_kl
    privilege: Tensor | None  # (...,) delta_n; None without labels; differentiable in topk_tail_kl
    student_logprob: Tensor | None  # (...,) s at the label
    teacher_logprob: Tensor | None  # (...,) t at the label; NaN where a served teacher does not list it
    student_mass: Tensor  # (...,) probability that the student gives to the support
    teacher_mass: Tensor  # (...,)
    topk_ids: Tensor  # (..., k) int64, by falling logit; -1 is padding

    @classmethod
    def spread(cls, loss: Tensor, rows: checks.Rows, lead: torch.Size, outputs: RowOutputs) -> TopKTailKL:
        """From the outputs of the rows that count."""
        full: dict[str, Any] = {
            name: None if x is None else rows.spread(x, lead, fill=-1 if name == "ids" else 0)
            for name, x in vars(outputs).items()
        }
        return cls(loss=loss, topk_ids=full.pop("ids"), **full)


@_graph_break
def topk_tail_kl(
    student_logits: Tensor,
    teacher_logits: Tensor | None = None,
    *,
    teacher_topk: tuple[Tensor, Tensor] | None = None,
    labels: Tensor | None = None,
    token_weight: Tensor | None = None,
    privilege_weight: Tensor | None = None,
    k: int = 20,
    support: str = "teacher",
    divergence: str = "reverse_kl",
    beta: float = 0.5,
    tail: str = "bucket",
    temperature: float = 1.0,
    num_items: int | float | Tensor | None = None,
    ignore_index: int = -100,
    process_group: ProcessGroup | None = None,
    backend: str = "auto",
) -> TopKTailKL:
    """The divergence of a student from a teacher over k ids and a tail, from logits.

    Args:
        student_logits: (..., V), any float dtype and strides; never written to. Half precision is computed in fp32.
        teacher_logits: (..., V). It gets a gradient if it requires one.
        teacher_topk: instead of teacher_logits, a served teacher's (ids (..., k') int64, logprobs (..., k')). All
            listed ids form the support and `k` is not used; entries with id -1 or logprob -inf, NaN or <= -9000 are
            padding. The tail is what the list leaves, 1 - sum e^logprob. Log-probs are taken as they are: ask the
            server for those at `temperature`.
        labels: (...,) int64, the sampled ids; rows with ignore_index do not count.
        token_weight: (...,) w, default 1; a constant. Rows of weight 0 do not count and may hold NaN.
        privilege_weight: (...,) v, default 0; a constant. Needs labels.
        k: size of the support, 1 <= k <= V. Ties at rank k go to the lowest id.
        support: whose top-k: "teacher" or "student".
        divergence: "reverse_kl" KL(student || teacher), "forward_kl" KL(teacher || student), or "jsd"
            beta KL(teacher || m) + (1 - beta) KL(student || m) with m = (1 - beta) student + beta teacher.
        tail: "bucket" adds one bucket for the ids outside the support, "renormalize" conditions both sides on the
            support, "drop" sums over the support alone (no divergence: it can be negative).
        num_items: Z, where rows are spread over micro-batches or ranks; a number or a one-element tensor.
        process_group: logits are the shards (..., V_rank), in rank order, of a vocabulary split over this group;
            labels and ids stay global, gradients are local and every process gets the whole loss.
        backend: "torch" on any device, "triton" on CUDA (or anywhere under TRITON_INTERPRET=1), "auto": "triton" on
            CUDA if it is installed, else "torch". They agree. The kernels take fp32 and half precision, supports of up
            to 127 ids and a whole vocabulary. All else (fp64, larger supports, a process_group) is computed by torch,
            on the same device and in the same memory bounds, whichever is named.

    Returns:
        TopKTailKL, whose loss, kl and privilege are differentiable.

    Raises:
        ValueError, TypeError: for arguments that cannot work, naming the sizes.
    """
    checks.backend(backend)
    checks.float_tensor("student_logits", student_logits)
    checks.teacher_form("teacher_logits", teacher_logits, teacher_topk, support)
    *lead, width = student_logits.shape
    lead = torch.Size(lead)
    if width == 0:
        raise ValueError(f"student_logits has shape {tuple(student_logits.shape)}: the vocabulary is empty")
    if teacher_logits is not None:
        checks.float_tensor("teacher_logits", teacher_logits)
        checks.same_logits(student_logits, teacher_logits)
    rows, served, options = _resolve(
        (student_logits, teacher_logits),
        lead,
        width,
        teacher_topk=teacher_topk,
        labels=labels,
        token_weight=token_weight,
        privilege_weight=privilege_weight,
        k=k,
        support=support,
        divergence=divergence,
        beta=beta,
        tail=tail,
        temperature=temperature,
        num_items=num_items,
        ignore_index=ignore_index,
        process_group=process_group,
        backend=backend,
    )
    outputs = RowOutputs(*LogitsLoss.apply(student_logits, teacher_logits, served, rows, options))
    value = outputs.kl
    if rows.privilege_weight is not None and outputs.privilege is not None:
        value = value - rows.privilege_weight * outputs.privilege
    return TopKTailKL.spread((rows.weight * value).sum(), rows, lead, outputs)


@_graph_break
def fused_linear_topk_tail_kl(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor | None = None,
    teacher_weight: Tensor | None = None,
    *,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    teacher_topk: tuple[Tensor, Tensor] | None = None,
    labels: Tensor | None = None,
    token_weight: Tensor | None = None,
    privilege_weight: Tensor | None = None,
    k: int = 20,
    support: str = "teacher",
    divergence: str = "reverse_kl",
    beta: float = 0.5,
    tail: str = "bucket",
    temperature: float = 1.0,
    num_items: int | float | Tensor | None = None,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    chunk_size: int | None = None,
    grad_filter: float | None = None,
    process_group: ProcessGroup | None = None,
    backend: str = "auto",
) -> TopKTailKL:
    """`topk_tail_kl` of logits = softcap(logit_scale * (h W^T + b)), softcap(x) = c tanh(x / c), without the logits.

    Rows that do not count are dropped ahead of the projection; the rest is projected `chunk_size` rows at a time, so
    memory beyond inputs and gradients does not grow with the number of rows. All gradients are formed in forward.

    Args (others as in `topk_tail_kl`):
        student_hidden: (..., H), fp32, bf16, fp16 or fp64; under autocast products take the autocast dtype.
        student_weight: (V, H).
        teacher_hidden: (..., H'), H' = H when the head is tied.
        teacher_weight: (V, H'). None: the head is tied, bias included, and its gradient sums both uses.
        student_bias, teacher_bias: (V,).
        logit_softcap: c, None for none.
        chunk_size: rows per chunk; None: as many as a byte budget holds. A CPU keeps a chunk's memory (up to 384 MiB)
            from call to call; `lopd_fast.scratch.release_scratch()` frees it.
        grad_filter: None is exact. A threshold such as 1e-5 on d(D - v delta) / d(h W^T + b), relative to its largest
            value in a chunk where that is below 1: columns of the vocabulary whose root mean square over the rows of a
            chunk is surely below it enter the hidden gradients together, as one typical column, which skips most of
            that product on a sharp model. Gradients of weights and biases stay exact. See docs/grad-filter.md.
        process_group: weights and biases are shards (V_rank, H) along the vocabulary; hidden states are replicated
            and get the whole gradient.

    Returns:
        TopKTailKL, whose loss alone is differentiable; loss is fp32 and each gradient has the dtype of its tensor.

    Raises:
        ValueError, TypeError: for arguments that cannot work, naming the sizes.
    """
    checks.backend(backend)
    checks.teacher_form("teacher_hidden", teacher_hidden, teacher_topk, support)
    checks.head("student", student_hidden, student_weight, student_bias)
    checks.projection(logit_scale, logit_softcap, chunk_size, grad_filter)
    if teacher_hidden is None:
        if teacher_weight is not None or teacher_bias is not None:
            raise ValueError("teacher_weight and teacher_bias need teacher_hidden, which was not given")
    elif teacher_weight is None:
        if teacher_bias is not None:
            raise ValueError(
                "teacher_bias needs teacher_weight: without it the head is tied, student_bias included"
            )
        checks.head("teacher", teacher_hidden, student_weight, student_bias)
    else:
        checks.head("teacher", teacher_hidden, teacher_weight, teacher_bias)
        checks.same_vocabulary(student_weight, teacher_weight)
    lead = student_hidden.shape[:-1]
    if teacher_hidden is not None and teacher_hidden.shape[:-1] != lead:
        raise ValueError(
            f"student_hidden has rows {tuple(lead)} but teacher_hidden has {tuple(teacher_hidden.shape[:-1])}: "
            "row n must be the same token on both sides"
        )
    inputs = (student_hidden, student_weight, student_bias, teacher_hidden, teacher_weight, teacher_bias)
    rows, served, options = _resolve(
        inputs,
        lead,
        student_weight.shape[0],
        teacher_topk=teacher_topk,
        labels=labels,
        token_weight=token_weight,
        privilege_weight=privilege_weight,
        k=k,
        support=support,
        divergence=divergence,
        beta=beta,
        tail=tail,
        temperature=temperature,
        num_items=num_items,
        ignore_index=ignore_index,
        process_group=process_group,
        backend=backend,
    )
    device = student_hidden.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    wanted = tuple(x is not None and x.requires_grad and torch.is_grad_enabled() for x in inputs)
    projection = Projection(logit_scale, logit_softcap)
    loss, *outputs = FusedLinearLoss.apply(
        *inputs, wanted, served, rows, options, projection, chunk_size, grad_filter, autocast
    )
    return TopKTailKL.spread(loss, rows, lead, RowOutputs(*outputs))


def _resolve(
    inputs: tuple[Tensor | None, ...],
    lead: torch.Size,
    width: int,
    *,
    teacher_topk: tuple[Tensor, Tensor] | None,
    labels: Tensor | None,
    token_weight: Tensor | None,
    privilege_weight: Tensor | None,
    k: int,
    support: str,
    divergence: str,
    beta: float,
    tail: str,
    temperature: float,
    num_items: int | float | Tensor | None,
    ignore_index: int,
    process_group: ProcessGroup | None,
    backend: str,
) -> tuple[checks.Rows, tuple[Tensor, Tensor] | None, LossOptions]:
    """The rows that count, a served teacher's lists, and the options, of a call on `inputs` with `width` local ids."""
    student = inputs[0]
    assert student is not None
    # fp64 stays fp64, everything else is computed in fp32
    double = any(x is not None and x.dtype == torch.float64 for x in inputs)
    dtype, device = torch.float64 if double else torch.float32, student.device
    shard = VocabShard.of(width, process_group, device)
    options = checks.options(
        shard, k=k, support=support, divergence=divergence, beta=beta, tail=tail, temperature=temperature
    )
    if teacher_topk is None:
        checks.support_size(k, shard.total)
    rows = checks.rows(
        lead,
        labels=labels,
        token_weight=token_weight,
        privilege_weight=privilege_weight,
        num_items=num_items,
        ignore_index=ignore_index,
        vocabulary=shard.total,
        dtype=dtype,
        device=device,
    )
    served = None
    if teacher_topk is not None:
        served = checks.served_teacher(teacher_topk, lead, rows, shard.total, dtype, device)
    ids = k if served is None else served[0].shape[-1]
    triton = uses_triton(backend, device, dtype, ids, shard.group is not None)
    return rows, served, replace(options, triton=triton)
