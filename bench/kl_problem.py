"""The tensors that `kl_throughput` runs on, and the right answers in fp64.

Errors of a filter, and of a tail that is a difference from 1, depend on how peaked the distributions are, so logits of
random hidden states would say nothing. See `make_problem` for what these are like.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

TEACHER_TOPK, STUDENT_TOPK, FULL = "teacher's top-k and tail", "student's top-k and tail", "full vocabulary"
CHECKED_ROWS, CHECKED_NUMBERS = (
    256,
    256 * 152_000 * 512,
)  # rows held against fp64, and rows x vocab x hidden of them
WEIGHT_ROWS = 4096  # rows of the head that are widened to fp64 at a time
CHUNK_NUMBERS = 1 << 22  # logits of a chunk that fp64 autograd works on


# In units of a logit, for heads whose rows have norm 1 about their mean.
COMMON, OWN = 2.0, 1.8  # spread of a row's logits: what all rows share, and what is its own
CANDIDATES, CERTAINTY, CERTAINTY_SPREAD, FALL = 24, 3.7, 3.0, 1.8  # certainty: above log V
TEACHER_MOVES, TEACHER_NOISE = 0.5, 0.3
HEAD_MEAN, FREQUENCY_TILT = 0.96, 0.2


@dataclass(frozen=True)
class Problem:
    """Hidden states of N rows on both sides and the frozen head that they share."""

    student_hidden: Tensor  # (N, H) leaf
    teacher_hidden: Tensor  # (N, H) leaf
    weight: Tensor  # (V, H)
    k: int

    @property
    def rows(self) -> int:
        return self.student_hidden.shape[0]

    @property
    def vocab(self) -> int:
        return self.weight.shape[0]

    @property
    def hidden(self) -> int:
        return self.weight.shape[1]

    def gradients(self, loss: Tensor, *sides: str) -> dict[str, Tensor]:
        """What a step returns: the loss, and the gradients of these sides' hidden states, "student" or "teacher"."""
        leaves = [getattr(self, f"{side}_hidden") for side in sides]
        return dict(zip(sides, torch.autograd.grad(loss, leaves), strict=True)) | {"loss": loss.detach()}


@dataclass(frozen=True)
class Exact:
    rows: Tensor  # (R,) indices of the rows that were computed
    answers: dict[
        str, dict[str, Tensor]
    ]  # per kind: "student", "teacher" (R, H), and "loss" () if these are all rows
    inputs: str  # one line on what the inputs are like


def make_problem(
    rows: int, vocab: int, hidden: int, dtype: torch.dtype, device: torch.device, k: int, seed: int = 0
) -> Problem:
    """Hidden states and a head whose logits are like those of a language model at tokens that it sampled itself.

    - A logit is a part that all rows share (frequent ids are likely everywhere), a part of the row's own, and
      `CANDIDATES` ids that stand out. These are drawn by frequency, so rows have some in common; the r-th lies about
      FALL log r below the first. How far they stand out differs from row to row: some are certain, some open.
    - The teacher sees what the student sees and something more: it moves the candidates, and everything a little.
    - Rows of the head share a mean as large as what sets them apart, and frequent ids lie elsewhere than rare ones.
      That is what a filter that replaces rows by their mean meets.

    Set by hand to resemble 200 rows of SmolLM2-135M-Instruct (vocabulary 49,152) at tokens that it sampled at T 0.7,
    with a teacher whose prompt has one more sentence. There the entropy was 1.7 nats, the teacher's top 20 held 0.92,
    the KL was 0.08, some gradient was above 1e-5 in a quarter of the columns, and a filter at 1e-5 was off by 1e-3,
    or by 4e-3 without the mean. At that size these inputs are a little sharper, and harder for the filter.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    weight = normal(vocab, hidden).mul_(hidden**-0.5)
    shared = COMMON * hidden**0.5  # first coordinate of every hidden state
    frequency = (shared * weight[:, 0]).softmax(0)
    ids = frequency.multinomial(rows * CANDIDATES, replacement=True, generator=generator).view(
        rows, CANDIDATES
    )

    def towards(strength: Tensor) -> Tensor:
        return functional.embedding_bag(ids, weight, per_sample_weights=strength, mode="sum")

    fall = FALL * torch.arange(1, CANDIDATES + 1, device=device).log()
    certainty = math.log(vocab) + CERTAINTY + CERTAINTY_SPREAD * normal(rows, 1)
    strength = certainty - fall + 0.7 * normal(rows, CANDIDATES)
    noise = (OWN**2 - strength.square().sum(1, keepdim=True) / hidden).clamp_min(0).sqrt()
    student = towards(strength) + noise * normal(rows, hidden)
    teacher = (
        student + towards(TEACHER_MOVES * normal(rows, CANDIDATES)) + TEACHER_NOISE * normal(rows, hidden)
    )
    student[:, 0] = teacher[:, 0] = shared
    weight[:, 1] += HEAD_MEAN
    weight[:, 2] += FREQUENCY_TILT * hidden**0.5 * weight[:, 0]
    return Problem(
        student.to(dtype).requires_grad_(), teacher.to(dtype).requires_grad_(), weight.to(dtype), k
    )


def checked_rows(problem: Problem) -> Tensor:
    """Indices of the rows that are held against fp64: all of few, else some spread evenly."""
    most = max(1, min(CHECKED_ROWS, CHECKED_NUMBERS // (problem.vocab * problem.hidden)))
    if problem.rows <= most:
        return torch.arange(problem.rows, device=problem.weight.device)
    return torch.linspace(0, problem.rows - 1, most, device=problem.weight.device).long()


def exact_answers(problem: Problem) -> Exact:
    """Plain log-softmaxes in fp64 and autograd, on the very numbers that the providers get."""
    rows = checked_rows(problem)
    logits = [_project(x[rows].detach().double(), problem.weight) for x in _sides(problem)]
    answers = {}
    for kind in (FULL, STUDENT_TOPK, TEACHER_TOPK):
        slopes = [torch.empty_like(x) for x in logits]
        total = logits[0].new_zeros(())
        step = max(1, CHUNK_NUMBERS // problem.vocab)
        for start in range(0, len(rows), step):
            leaves = [x[start : start + step].clone().requires_grad_() for x in logits]
            loss = divergence(leaves[0], leaves[1], kind, problem.k).sum() / problem.rows
            for slope, grad in zip(slopes, torch.autograd.grad(loss, leaves), strict=True):
                slope[start : start + step] = grad
            total += loss.detach()
        answers[kind] = {
            name: _multiply_back(x, problem.weight)
            for name, x in zip(("student", "teacher"), slopes, strict=True)
        }
        if len(rows) == problem.rows:
            answers[kind]["loss"] = total
    return Exact(rows, answers, _describe(logits, slopes, problem))


def _describe(logits: list[Tensor], slopes: list[Tensor], problem: Problem) -> str:
    """What the inputs are like. `slopes` are those of the teacher's top-k and tail."""
    s, t = (x.log_softmax(-1) for x in logits)
    entropy = -(s.exp() * s).sum(-1).mean()
    mass = t.topk(problem.k).values.exp().sum(-1).mean()
    kl = divergence(logits[0], logits[1], TEACHER_TOPK, problem.k).mean()
    active = ((slopes[0] * problem.rows).abs().amax(0) > 1e-5).double().mean()
    return (
        f"inputs: student's entropy {entropy:.2f} nats, teacher's top {problem.k} hold {mass:.3f}, KL {kl:.3f} nats; "
        f"some |dKL/dlogit| of {len(s)} rows passes 1e-5 in {active:.0%} of the columns"
    )


def _sides(problem: Problem) -> tuple[Tensor, Tensor]:
    return problem.student_hidden, problem.teacher_hidden


def _project(hidden: Tensor, weight: Tensor) -> Tensor:
    return torch.cat([hidden @ block.double().t() for block in weight.split(WEIGHT_ROWS)], dim=1)


def _multiply_back(grad: Tensor, weight: Tensor) -> Tensor:
    out = grad.new_zeros(len(grad), weight.shape[1])
    for columns, block in zip(grad.split(WEIGHT_ROWS, dim=1), weight.split(WEIGHT_ROWS), strict=True):
        out += columns @ block.double()
    return out


def divergence(student: Tensor, teacher: Tensor, kind: str, k: int) -> Tensor:
    """KL(student || teacher) per row, fp64 logits (R, V) -> (R,)."""
    s, t = student.log_softmax(-1), teacher.log_softmax(-1)
    if kind != FULL:
        ids = (teacher if kind == TEACHER_TOPK else student).detach().topk(k, dim=-1).indices
        s, t = _buckets(s, ids), _buckets(t, ids)
    return (s.exp() * (s - t)).sum(-1)


def _buckets(logprobs: Tensor, ids: Tensor) -> Tensor:
    """Log-probs of the ids and of all others together."""
    outside = torch.ones_like(logprobs, dtype=torch.bool).scatter_(-1, ids, False)
    tail = logprobs.masked_fill(~outside, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logprobs.gather(-1, ids), tail], dim=-1)
