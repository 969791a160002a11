"""The divergence between two rows of buckets, with the gradients of both sides in closed form.

Log-probs s of the student and t of the teacher, q = e^s, p = e^t, over k buckets and, for tail "bucket", a last one.
Complete buckets (tail "bucket" or "renormalize") sum to 1 on both sides:

    reverse KL   D = sum q (s - t)                  student q (s - t - D)        teacher p - q
    forward KL   D = sum p (t - s)                  student q - p                teacher p (t - s - D)
    JSD          D = a KL(q || m) + b KL(p || m)    student a q (log(q / m) - KL(q || m)), teacher alike
                 b = beta, a = 1 - beta, m = a q + b p

Otherwise (tail "drop") the ids outside move the normaliser alone; `rest` is their gradient over softmax. Each KL is
summed as q (s - t) + p - q, terms >= 0 that vanish to second order, so near-equal distributions lose no digits. Lanes
without a bucket hold -inf on both sides and add exactly 0.

Shapes: per side log_support (R, k) and log_tail (R,) of `support_logprobs`, or a served teacher's. Results: D (R,), and
per side the gradient for the logits of the support (R, k), that for all others, summed over the tail (R,), and the mass
of the support (R,). The backward is `logits_grad`.
"""

# A type checker takes a kernel for the plain function under @triton.jit.
# pyright: reportCallIssue=false, reportOperatorIssue=false

import triton
import triton.language as tl
from torch import Tensor

from lopd_fast.kernels._common import NEG_INF, expm1, expm1_minus, lane_count, log1p

INF = tl.constexpr(float("inf"))


def bytes_moved(rows: int, k: int) -> int:
    return rows * (16 * k + 28)


def flops(rows: int, k: int) -> int:
    return rows * 60 * (k + 1)


# A row is a warp: 128 lanes, the most, are 4 numbers a thread.
LAUNCH = dict(num_warps=1)


@triton.jit
def _log_ratio(log_a, log_b):
    """log(a / b), 0 where both are 0."""
    both_zero = (log_a == NEG_INF) & (log_b == NEG_INF)
    return tl.where(both_zero, 0.0, tl.where(both_zero, 0.0, log_a) - log_b)


@triton.jit
def _times(probability, factor):
    """probability * factor with 0 * inf = 0, the limit of x log x."""
    return tl.where((probability == 0) & (tl.abs(factor) == INF), 0.0, probability * factor)


@triton.jit
def _difference(log_a, log_b):
    """a - b without the cancellation of exp(log_a) - exp(log_b)."""
    ratio = _log_ratio(log_a, log_b)
    size = tl.exp(tl.maximum(log_a, log_b)) * -expm1(-tl.abs(ratio))
    return tl.where(ratio < 0, -size, size)


@triton.jit
def _excess(log_a, log_b, ratio):
    """a log(a / b) + b - a, >= 0; ratio is log(b / a)."""
    a = tl.exp(log_a)
    far = tl.exp(log_b) - a - _times(a, ratio)
    return tl.where((ratio < 1) & (log_a != NEG_INF), a * expm1_minus(ratio), far)


@triton.jit
def _centred(a, ratio):
    """a (ratio - sum a ratio) for a that sums to 1; ratios count from that of the heaviest bucket."""
    heaviest = tl.argmax(a, axis=0)
    lane = tl.arange(0, a.shape[0])
    ratio = ratio - tl.sum(tl.where(lane == heaviest, ratio, 0.0), axis=0)
    return _times(a, ratio - tl.sum(_times(a, ratio), axis=0))


@triton.jit
def _kl(log_a, log_b, COMPLETE: tl.constexpr):
    """KL(a || b), its gradients for a and b, and the rests of a and b."""
    a = tl.exp(log_a)
    b = tl.exp(log_b)
    ratio = _log_ratio(log_a, log_b)
    if COMPLETE:
        value = tl.sum(_excess(log_a, log_b, -ratio), axis=0)
        grad_a = _centred(a, ratio)
        grad_b = _difference(log_b, log_a)
        rest_a = value * 0
        rest_b = value * 0
    else:
        value = tl.sum(_times(a, ratio), axis=0)
        mass = tl.sum(a, axis=0)
        grad_a = _times(a, ratio + 1 - (value + mass))
        grad_b = b * mass - a
        rest_a = -(value + mass)
        rest_b = mass
    return value, grad_a, grad_b, rest_a, rest_b


@triton.jit
def _jsd(log_q, log_p, beta, COMPLETE: tl.constexpr):
    ratio = _log_ratio(log_p, log_q)  # log(p / q)
    # log(m / q) and log(m / p), each by the side on which expm1 stays small: exactly 0 where p == q
    low = log1p(beta * expm1(tl.minimum(ratio, 0.0)))
    high = log1p((1 - beta) * expm1(-tl.maximum(ratio, 0.0)))
    m_over_q = tl.where(ratio > 0, ratio + high, low)
    m_over_p = tl.where(ratio > 0, high, low - ratio)
    log_m = tl.where(ratio > 0, log_p + m_over_p, log_q + m_over_q)
    q = tl.exp(log_q)
    p = tl.exp(log_p)
    kl_q = tl.sum(_excess(log_q, log_m, m_over_q), axis=0)
    kl_p = tl.sum(_excess(log_p, log_m, m_over_p), axis=0)
    value = (1 - beta) * kl_q + beta * kl_p
    if COMPLETE:
        grad_q = -(1 - beta) * _centred(q, m_over_q)
        grad_p = -beta * _centred(p, m_over_p)
        rest_q = value * 0
        rest_p = value * 0
    else:
        grad_q = -(1 - beta) * _times(q, m_over_q)
        grad_p = -beta * _times(p, m_over_p)
        rest_q = -tl.sum(grad_q, axis=0)
        rest_p = -tl.sum(grad_p, axis=0)
        grad_q += q * rest_q
        grad_p += p * rest_p
    return value, grad_q, grad_p, rest_q, rest_p


@triton.jit
def _renormalised(log_support):
    peak = tl.max(log_support, axis=0)
    peak = tl.where(peak == NEG_INF, 0.0, peak)
    total = tl.sum(tl.exp(log_support - peak), axis=0)
    return log_support - (peak + tl.log(tl.where(total > 0, total, 1.0)))


@triton.jit
def _mass(log_support, log_tail):
    """From the tail where that is the smaller, so that rounding never passes 1."""
    return tl.where(log_tail < -0.7, -expm1(log_tail), tl.sum(tl.exp(log_support), axis=0))


@triton.jit
def bucket_divergence_kernel(
    s_log_support_ptr,  # (R, K)
    s_log_tail_ptr,  # (R,)
    t_log_support_ptr,
    t_log_tail_ptr,
    s_kl_support_ptr,  # (R, K)
    t_kl_support_ptr,
    kl_ptr,  # (R,), as all below
    s_kl_tail_ptr,
    t_kl_tail_ptr,
    s_mass_ptr,
    t_mass_ptr,
    beta,
    DIVERGENCE: tl.constexpr,
    TAIL: tl.constexpr,
    K: tl.constexpr,
    LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    s = tl.load(s_log_support_ptr + row * K + lane, mask=lane < K, other=NEG_INF)
    t = tl.load(t_log_support_ptr + row * K + lane, mask=lane < K, other=NEG_INF)
    s_tail = tl.load(s_log_tail_ptr + row)
    t_tail = tl.load(t_log_tail_ptr + row)
    tl.store(s_mass_ptr + row, _mass(s, s_tail))
    tl.store(t_mass_ptr + row, _mass(t, t_tail))
    if TAIL == "bucket":
        s = tl.where(lane == K, s_tail, s)
        t = tl.where(lane == K, t_tail, t)
    elif TAIL == "renormalize":
        s = _renormalised(s)
        t = _renormalised(t)
    if DIVERGENCE == "jsd":
        value, s_grad, t_grad, s_rest, t_rest = _jsd(s, t, beta, TAIL != "drop")
    elif DIVERGENCE == "reverse_kl":
        value, s_grad, t_grad, s_rest, t_rest = _kl(s, t, TAIL != "drop")
    else:
        value, t_grad, s_grad, t_rest, s_rest = _kl(t, s, TAIL != "drop")
    if TAIL == "bucket":
        s_rest = tl.sum(tl.where(lane == K, s_grad, 0.0), axis=0)
        t_rest = tl.sum(tl.where(lane == K, t_grad, 0.0), axis=0)
    else:
        s_rest = s_rest * tl.exp(s_tail)
        t_rest = t_rest * tl.exp(t_tail)
    tl.store(kl_ptr + row, value)
    tl.store(s_kl_support_ptr + row * K + lane, s_grad, mask=lane < K)
    tl.store(t_kl_support_ptr + row * K + lane, t_grad, mask=lane < K)
    tl.store(s_kl_tail_ptr + row, s_rest)
    tl.store(t_kl_tail_ptr + row, t_rest)


def bucket_divergence(
    student: tuple[Tensor, Tensor],
    teacher: tuple[Tensor, Tensor],
    *,
    divergence: str,
    beta: float,
    tail: str,
) -> tuple[Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """kl (R,), then (kl_support (R, k), kl_tail (R,)) of the student, the same of the teacher, and both masses (R,).

    student, teacher  # (log_support (R, k), log_tail (R,)) fp32
    """
    rows, k = student[0].shape
    s_kl_support, t_kl_support = student[0].new_empty(2, rows, k)
    kl, s_kl_tail, t_kl_tail, s_mass, t_mass = student[0].new_empty(5, rows)
    if rows:
        bucket_divergence_kernel[(rows,)](
            *(x.contiguous() for x in (*student, *teacher)),
            s_kl_support,
            t_kl_support,
            kl,
            s_kl_tail,
            t_kl_tail,
            s_mass,
            t_mass,
            float(beta),
            DIVERGENCE=divergence,
            TAIL=tail,
            K=k,
            LANES=lane_count(k),
            **LAUNCH,
        )
    return kl, (s_kl_support, s_kl_tail), (t_kl_support, t_kl_tail), (s_mass, t_mass)
