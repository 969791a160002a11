"""Divergences between two distributions over a few buckets, with their gradients in closed form.

Student log-probs s and teacher log-probs t are (R, B); q = e^s, p = e^t. The last bucket may be a tail, that is the
probability of every id outside the support. For a divergence D = sum_b f(s_b, t_b) of log-softmax outputs, the
gradient with respect to the logits behind s is

    dD/dz_b = g_b - q_b G,      g_b = df/ds_b,      G = sum_b g_b

Over complete buckets, that is those that sum to 1 on both sides, this becomes

    reverse KL   D = sum q (s - t)        student q (s - t - D)        teacher p - q
    forward KL   D = sum p (t - s)        student q - p                teacher p (t - s - D)
    JSD          D = a KL(q || m) + b KL(p || m),   b = beta, a = 1 - beta, m = a q + b p
                 student a q (log(q / m) - KL(q || m)),   teacher b p (log(p / m) - KL(p || m))

Each KL is summed as q (s - t) + p - q, whose terms are >= 0 and vanish to second order: near-equal distributions
lose no digits to cancellation, and nothing needs a clamp. Probability 0 with log-prob -inf contributes exactly 0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

NEG_INF = float("-inf")


@dataclass(frozen=True)
class BucketDivergence:
    """D per row and its gradients with respect to the logits; `*_rest` is the one of all ids outside, summed."""

    value: Tensor  # (R,)
    student: Tensor  # (R, B)
    teacher: Tensor  # (R, B)
    student_rest: Tensor  # (R,)
    teacher_rest: Tensor  # (R,)


def _log_ratio(log_a: Tensor, log_b: Tensor) -> Tensor:
    """log(a / b), 0 where both are 0."""
    both_zero = (log_a == NEG_INF) & (log_b == NEG_INF)
    return (log_a - log_b).masked_fill(both_zero, 0.0)


def _times(probability: Tensor, factor: Tensor) -> Tensor:
    """probability * factor with 0 * inf = 0, the limit of x log x."""
    return torch.where((probability == 0) & factor.isinf(), 0.0, probability * factor)


def _difference(log_a: Tensor, log_b: Tensor) -> Tensor:
    """a - b without the cancellation of exp(log_a) - exp(log_b)."""
    ratio = _log_ratio(log_a, log_b)
    return torch.maximum(log_a, log_b).exp() * -torch.expm1(-ratio.abs()) * ratio.sign()


def _excess(log_a: Tensor, log_b: Tensor, ratio: Tensor) -> Tensor:
    """a log(a / b) + b - a, >= 0; `ratio` is log(b / a), handed in because the caller may know it better."""
    a = log_a.exp()
    near = a * (torch.expm1(ratio) - ratio)
    far = log_b.exp() - a - _times(a, ratio)
    return torch.where((ratio < 1) & (log_a != NEG_INF), near, far)


def _centred(a: Tensor, ratio: Tensor) -> Tensor:
    """a (ratio - sum a ratio) for a that sums to 1.

    Ratios count from that of the heaviest bucket: where that one holds nearly all of a, its own difference is small
    and would drown in the rounding of the sum.
    """
    if a.shape[-1] == 0:
        return a
    ratio = ratio - ratio.gather(-1, a.argmax(-1, keepdim=True))
    return _times(a, ratio - _times(a, ratio).sum(-1, keepdim=True))


def _kl(log_a: Tensor, log_b: Tensor, complete: bool) -> tuple[Tensor, ...]:
    """KL(a || b) and its gradients: value, for a (R, B), for b (R, B), rest of a (R,), rest of b (R,)."""
    a, b = log_a.exp(), log_b.exp()
    ratio = _log_ratio(log_a, log_b)
    if complete:
        value = _excess(log_a, log_b, -ratio).sum(-1)
        none = torch.zeros_like(value)
        return value, _centred(a, ratio), _difference(log_b, log_a), none, none
    value, mass = _times(a, ratio).sum(-1), a.sum(-1)
    total = value + mass
    grad_a = _times(a, ratio + 1 - total[:, None])
    return value, grad_a, b * mass[:, None] - a, -total, mass


def _jsd(log_q: Tensor, log_p: Tensor, beta: float, complete: bool) -> BucketDivergence:
    ratio = _log_ratio(log_p, log_q)  # log(p / q)
    # log(m / q) and log(m / p), each by the side on which expm1 stays small: exactly 0 where p == q.
    low = torch.log1p(beta * torch.expm1(ratio.clamp(max=0)))
    high = torch.log1p((1 - beta) * torch.expm1(-ratio.clamp(min=0)))
    m_over_q = torch.where(ratio > 0, ratio + high, low)
    m_over_p = torch.where(ratio > 0, high, low - ratio)
    log_m = torch.where(ratio > 0, log_p + m_over_p, log_q + m_over_q)
    q, p = log_q.exp(), log_p.exp()
    # a (m - q) + b (m - p) = 0 in every bucket, so this holds for incomplete buckets too.
    kl_q, kl_p = _excess(log_q, log_m, m_over_q).sum(-1), _excess(log_p, log_m, m_over_p).sum(-1)
    value = (1 - beta) * kl_q + beta * kl_p
    if complete:
        grad_q, grad_p = -(1 - beta) * _centred(q, m_over_q), -beta * _centred(p, m_over_p)
        none = torch.zeros_like(value)
        return BucketDivergence(value, grad_q, grad_p, none, none)
    grad_q, grad_p = -(1 - beta) * _times(q, m_over_q), -beta * _times(p, m_over_p)
    rest_q, rest_p = -grad_q.sum(-1), -grad_p.sum(-1)
    return BucketDivergence(value, grad_q + q * rest_q[:, None], grad_p + p * rest_p[:, None], rest_q, rest_p)


def bucket_divergence(
    log_q: Tensor, log_p: Tensor, divergence: str, beta: float, complete: bool
) -> BucketDivergence:
    """The divergence of student buckets `log_q` (R, B) from teacher buckets `log_p` (R, B).

    `complete` says that the buckets of each side sum to 1. Otherwise ids outside them still move the normaliser:
    their gradient is softmax * `*_rest`.
    """
    if divergence == "jsd":
        return _jsd(log_q, log_p, beta, complete)
    if divergence == "reverse_kl":
        return BucketDivergence(*_kl(log_q, log_p, complete))
    value, teacher, student, teacher_rest, student_rest = _kl(log_p, log_q, complete)
    return BucketDivergence(value, student, teacher, student_rest, teacher_rest)
