"""The loss by its plain formula: full log-softmaxes in fp64 and autograd. It shares no code with the product."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Expected:
    loss: Tensor
    kl: Tensor
    privilege: Tensor | None
    student_logprob: Tensor | None
    teacher_logprob: Tensor | None
    student_mass: Tensor
    teacher_mass: Tensor
    topk_ids: Tensor


def lowest_id_topk(logits: Tensor, k: int) -> Tensor:
    """Ids of the k largest, ties to the lowest id."""
    return torch.argsort(logits.detach(), dim=-1, descending=True, stable=True)[..., :k]


def f_divergence(s: Tensor, t: Tensor, divergence: str, beta: float) -> Tensor:
    """sum over the last dimension of log-probs; buckets that both sides give -inf must be left out by the caller."""
    q, p = s.exp(), t.exp()
    if divergence == "reverse_kl":
        return (q * (s - t)).sum(-1)
    if divergence == "forward_kl":
        return (p * (t - s)).sum(-1)
    m = ((1 - beta) * q + beta * p).log()
    return (beta * p * (t - m) + (1 - beta) * q * (s - m)).sum(-1)


def expected(
    student: Tensor,
    teacher: Tensor,
    *,
    labels: Tensor | None = None,
    token_weight: Tensor | None = None,
    privilege_weight: Tensor | None = None,
    k: int = 20,
    support: str = "teacher",
    divergence: str = "reverse_kl",
    beta: float = 0.5,
    tail: str = "bucket",
    temperature: float = 1.0,
    num_items: float | None = None,
    ignore_index: int = -100,
    ids: Tensor | None = None,
) -> Expected:
    """student, teacher  # (..., V) fp64 leaves or functions of some; ids  # (..., k) replaces the top-k."""
    assert student.dtype == teacher.dtype == torch.float64
    width = student.shape[-1]
    s = (student / temperature).log_softmax(-1)
    t = (teacher / temperature).log_softmax(-1)
    if ids is None:
        ids = lowest_id_topk(teacher if support == "teacher" else student, k)
    outside = torch.ones_like(s, dtype=torch.bool).scatter(-1, ids, False)
    s_buckets, t_buckets = s.gather(-1, ids), t.gather(-1, ids)
    masses = s_buckets.exp().sum(-1), t_buckets.exp().sum(-1)
    if tail == "bucket" and ids.shape[-1] < width:
        s_tail = s.masked_fill(~outside, -torch.inf).logsumexp(-1, keepdim=True)
        t_tail = t.masked_fill(~outside, -torch.inf).logsumexp(-1, keepdim=True)
        s_buckets, t_buckets = torch.cat([s_buckets, s_tail], -1), torch.cat([t_buckets, t_tail], -1)
    if tail == "renormalize":
        s_buckets, t_buckets = s_buckets.log_softmax(-1), t_buckets.log_softmax(-1)
    kl = f_divergence(s_buckets, t_buckets, divergence, beta)

    counts = torch.ones_like(kl)
    if labels is not None:
        counts = (labels != ignore_index).to(kl.dtype)
    weight = counts if token_weight is None else counts * token_weight.double()
    privilege = student_logprob = teacher_logprob = None
    value = kl
    if labels is not None:
        at = labels.masked_fill(labels == ignore_index, 0)[..., None]
        student_logprob, teacher_logprob = s.gather(-1, at)[..., 0], t.gather(-1, at)[..., 0]
        privilege = teacher_logprob - student_logprob.detach()
        if privilege_weight is not None:
            value = kl - privilege_weight.double() * privilege
    z = weight.sum() if num_items is None else num_items
    loss = (weight * value).sum() / z
    return Expected(loss, kl, privilege, student_logprob, teacher_logprob, masses[0], masses[1], ids)


def peaked(*shape: int, seed: int, scale: float = 3.0) -> Tensor:
    """fp64 logits whose softmax is far from flat: normal noise, and a few large entries a row."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return scale * noise + 6 * (noise > 1.5)


def relative_error(actual: Tensor | None, wanted: Tensor | None) -> float:
    """|actual - wanted| / |wanted| in the 2-norm, in fp64."""
    assert actual is not None and wanted is not None, "a tensor that should be there is None"
    actual, wanted = actual.detach().double(), wanted.detach().double()
    return float((actual - wanted).norm() / wanted.norm().clamp(min=1e-300))
