"""Drop-ins for the reference code of LOPD (its `lopd/loss.py` and `lopd/worker.py`).

`topk_reverse_kl` stands in for the function of that name. `rollout_loss` stands in for the losses of its three phases:
the teacher's top-k without gradient, the student's loss, and the composer's loss on a second teacher pass. Both
gradients are taken at the same parameters, so one teacher pass and one fused loss give both.

Where the numbers differ, these are the exact ones: the reference holds the log of the listed mass at or below -1e-7, so
a tail of less than 1e-7 is read as 1e-7 and passes no gradient, and it cuts the longer of two misaligned rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lopd_fast.losses import fused_linear_topk_tail_kl


def topk_reverse_kl(student_topk_lp: Tensor, teacher_topk_lp: Tensor) -> tuple[Tensor, int]:
    """KL(student || teacher) over listed ids and a tail, summed over tokens; the signature of the reference's.

    The tail is what a list leaves, 1 - sum e^lp, in fp64. Log-probs alone do not resolve a tail below their own
    rounding (1.2e-7 in fp32), so a smaller one counts as that and passes no gradient; from hidden states or logits,
    `rollout_loss` and `lopd_fast.topk_tail_kl` compute it to full precision.

    Args:
        student_topk_lp, teacher_topk_lp: (..., k) log-probs of the same ids; gradient goes to each that requires it.

    Returns:
        The sum () over tokens, fp32 or as wide as the wider argument, and the number of tokens.

    Raises:
        ValueError: if the shapes differ.
    """
    if student_topk_lp.shape != teacher_topk_lp.shape:
        raise ValueError(
            f"student_topk_lp has shape {tuple(student_topk_lp.shape)} and teacher_topk_lp "
            f"{tuple(teacher_topk_lp.shape)}: entry i of row n must be the same id of the same token on both sides"
        )
    dtype = torch.promote_types(
        torch.promote_types(student_topk_lp.dtype, teacher_topk_lp.dtype), torch.float32
    )
    s, t = _with_tail(student_topk_lp, dtype), _with_tail(teacher_topk_lp, dtype)
    kl = (s.exp() * (s - t)).sum(-1)  # (...,)
    return kl.sum().to(dtype), kl.numel()


def _with_tail(logprobs: Tensor, dtype: torch.dtype) -> Tensor:
    """(..., k) of a precision `dtype` -> (..., k + 1) fp64, the log of the rest last."""
    logprobs = logprobs.double()
    rest = (1.0 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=torch.finfo(dtype).eps)
    return torch.cat([logprobs, rest.log()], dim=-1)


@dataclass(frozen=True)
class RolloutLoss:
    """The loss of one rollout. All but `loss` are constants for the log, under the reference's names."""

    loss: Tensor  # () call backward once: both phases' gradients
    kl_sum: Tensor  # () sum of D over the rollout's tokens
    delta: Tensor  # () A mean (log pi_T(a) - log pi_S(a))
    anchor: Tensor  # () mean square of c_phi - c_phi0
    n_tokens: int


class _ScaledGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def rollout_loss(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    labels: Tensor,
    *,
    reward: float,
    beta: float,
    margin: float,
    anchor_lambda: float,
    latents: Tensor,
    anchor_latents: Tensor,
    top_k: int,
    global_tokens: int,
    n_rollouts: int,
    world_size: int = 1,
    **options: Any,
) -> RolloutLoss:
    """One rollout of the reference's student and composer phases, from hidden states at its supervised positions.

    Backward gives the student what `student_loss` gives it, sum_n dD_n * world_size / global_tokens, and the composer
    what `composer_loss` gives it, the gradient of

        (mean_n D_n + beta (margin - A mean_n delta_n) + anchor_lambda mean (c_phi - c_phi0)^2) / n_rollouts

    with A = 2 reward - 1. (The two phases weigh rollouts of unequal length differently; so does this.)

    Args:
        student_hidden: (n, H) last hidden states that predict the supervised tokens, `hidden[:-1][sup_mask]`.
        student_weight: (V, H) the student's head.
        teacher_hidden: (n, H') the same of the teacher, a function of `latents`.
        teacher_weight: (V, H') the frozen head.
        labels: (n,) int64, the tokens themselves, `target_ids[1:][sup_mask]`.
        latents, anchor_latents: c_phi and c_phi0 of one shape; the gradient goes to c_phi.
        top_k: size of the support, the teacher's own.
        global_tokens: supervised tokens of the step, over all ranks.
        n_rollouts: rollouts of the step on this rank, the reference's len(active).
        options: more of `lopd_fast.fused_linear_topk_tail_kl`, such as chunk_size.

    Raises:
        ValueError: if the two sides do not have the same tokens, or there is none.
    """
    n = labels.numel()
    if n == 0:
        raise ValueError("the rollout has no supervised tokens: leave it out of the step")
    if latents.shape != anchor_latents.shape:
        raise ValueError(
            f"latents have shape {tuple(latents.shape)} and anchor_latents {tuple(anchor_latents.shape)}: "
            "they must be of the same memories"
        )
    num_items = global_tokens / world_size
    advantage = 2.0 * float(reward) - 1.0
    out = fused_linear_topk_tail_kl(
        student_hidden,
        student_weight,
        _ScaledGradient.apply(teacher_hidden, num_items / (n * n_rollouts)),
        teacher_weight,
        labels=labels,
        # The student's side of delta is held constant, so this reaches the teacher alone.
        privilege_weight=torch.full(labels.shape, beta * advantage, device=labels.device),
        k=top_k,
        num_items=num_items,
        ignore_index=-1,
        **options,
    )
    assert out.privilege is not None
    anchor = (latents - anchor_latents.detach()).float().square().mean()
    return RolloutLoss(
        loss=out.loss + (anchor_lambda * anchor + beta * margin) / n_rollouts,
        kl_sum=out.kl.detach().sum(),
        delta=advantage * out.privilege.detach().mean(),
        anchor=anchor.detach(),
        n_tokens=n,
    )
