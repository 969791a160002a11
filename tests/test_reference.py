"""Drop-ins for the reference code of LOPD, against its loss as it is written down there, floor and all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ops.oracle import peaked, relative_error
from torch import Tensor
from torch.nn.functional import linear

from lopd_fast.integrations.reference import rollout_loss, topk_reverse_kl

WIDTH, HIDDEN, LATENTS, TOPK = 60, 8, 3, 5
MARGIN, LAMBDA, BETA = 0.05, 0.2, 0.7
FLOOR = 1e-7  # of the reference's tail
SURE = 3.0  # scale of a head whose tails straddle the floor


def with_tail(listed: Tensor, floor: float) -> Tensor:
    """The listed log-probs and the log of what they leave; the log of their mass stays at or below -floor."""
    mass = listed.logsumexp(-1, keepdim=True).clamp(max=-floor)
    return torch.cat([listed, (-mass.expm1()).log()], -1)


def reference_kl(student: Tensor, teacher: Tensor, floor: float = FLOOR) -> Tensor:
    s, t = with_tail(student, floor), with_tail(teacher, floor)
    return (s.exp() * (s - t)).sum(-1)


def listed(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_topk_reverse_kl_is_the_reference(dtype: torch.dtype) -> None:
    """Sum, count and both gradients, where tails lie above the floor."""
    student, teacher = (peaked(2, 7, WIDTH, seed=seed, scale=1.0) for seed in (1, 2))
    ids = teacher.topk(TOPK).indices
    leaves = [listed(x, ids).to(dtype).requires_grad_() for x in (student, teacher)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    total, count = topk_reverse_kl(leaves[0], leaves[1])
    want = reference_kl(exact[0], exact[1]).sum()
    assert count == 14 and isinstance(count, int) and total.dtype == dtype
    assert total.item() == pytest.approx(want.item(), rel=1e-5)
    got = torch.autograd.grad(total, leaves)
    for name, a, b in zip(("student", "teacher"), got, torch.autograd.grad(want, exact), strict=True):
        assert relative_error(a, b) < 1e-5, name


def test_topk_reverse_kl_of_sure_models() -> None:
    """fp32 log-probs whose mass rounds to 1: the reference's floor and ours agree to 1e-3, and nothing is infinite."""
    ids = torch.arange(TOPK).expand(4, TOPK)
    student, teacher = torch.zeros(4, WIDTH), torch.zeros(4, WIDTH)
    for row, height in enumerate((14.0, 18.0, 25.0, 60.0)):
        student[row, 0], teacher[row, 0] = height, height - 3
    leaves = [listed(x, ids).requires_grad_() for x in (student, teacher)]
    total, _ = topk_reverse_kl(*leaves)
    total.backward()
    assert abs(total.item() - reference_kl(leaves[0].detach(), leaves[1].detach()).sum().item()) < 1e-3
    assert all(x.grad is not None and x.grad.isfinite().all() for x in leaves)


def test_topk_reverse_kl_refuses_shapes_that_differ() -> None:
    with pytest.raises(ValueError, match=r"\(3, 5\).*\(3, 4\)"):
        topk_reverse_kl(torch.zeros(3, 5), torch.zeros(3, 4))


class Step:
    """Two rollouts of unequal length, a student and a teacher that reads latents; everything in fp64 leaves."""

    def __init__(self, scale: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(5)

        def leaf(*shape: int, grow: float = 1.0) -> Tensor:
            return (grow * torch.randn(*shape, generator=generator, dtype=torch.float64)).requires_grad_()

        self.body, self.head = leaf(HIDDEN, HIDDEN), leaf(WIDTH, HIDDEN, grow=scale)  # theta
        self.composer = leaf(LATENTS, HIDDEN)  # phi
        self.frozen_head = self.head.detach() + 0.1 * torch.randn(WIDTH, HIDDEN, generator=generator).double()
        self.anchors = self.composer.detach() + 0.3
        self.inputs = [torch.randn(n, HIDDEN, generator=generator).double() for n in (7, 3)]
        self.labels = [torch.randint(WIDTH, (n,), generator=generator) for n in (7, 3)]
        self.rewards = [1.0, 0.25]
        self.phi, self.theta = [self.composer], [self.body, self.head]

    def student(self, rollout: int) -> Tensor:
        return self.inputs[rollout] @ self.body

    def teacher(self, rollout: int) -> tuple[Tensor, Tensor]:
        latents = self.composer * (1 + rollout)
        return (self.inputs[rollout] @ self.body).detach() + latents.mean(0), latents


def reference_step(
    step: Step, world_size: int, global_tokens: int, floor: float
) -> tuple[Any, Any, dict[str, Any]]:
    """The three phases: teacher's top-k without gradient, the student's loss, the composer's on a second pass."""
    records = []
    for r, labels in enumerate(step.labels):
        with torch.no_grad():
            teacher = linear(step.teacher(r)[0], step.frozen_head).log_softmax(-1)
            values, ids = teacher.topk(TOPK)
        student = linear(step.student(r), step.head).log_softmax(-1)
        kl = reference_kl(student.gather(-1, ids), values, floor).sum()
        (kl * world_size / global_tokens).backward()
        at_label = student.gather(-1, labels[:, None])[:, 0]
        records.append((ids, student.gather(-1, ids).detach(), at_label.detach(), kl.item()))
    logged: dict[str, Any] = {"kl_sum": [kl for *_, kl in records], "delta": [], "anchor": []}
    for r, (ids, student_listed, student_at, _) in enumerate(records):
        hidden, latents = step.teacher(r)
        teacher = linear(hidden, step.frozen_head).log_softmax(-1)
        kl = reference_kl(student_listed, teacher.gather(-1, ids), floor).mean()
        gain = teacher.gather(-1, step.labels[r][:, None])[:, 0] - student_at
        delta = (2 * step.rewards[r] - 1) * gain.mean()
        anchor = (latents - step.anchors).square().mean()
        ((kl + BETA * (MARGIN - delta) + LAMBDA * anchor) / len(records)).backward()
        logged["delta"].append(delta.item())
        logged["anchor"].append(anchor.item())
    grads = [x.grad for x in step.theta], [x.grad for x in step.phi]
    for x in (*step.theta, *step.phi):
        x.grad = None
    return *grads, logged


def our_step(
    step: Step, world_size: int, global_tokens: int, **options: Any
) -> tuple[Any, Any, dict[str, Any]]:
    logged: dict[str, Any] = {"kl_sum": [], "delta": [], "anchor": []}
    for r, labels in enumerate(step.labels):
        hidden, latents = step.teacher(r)
        out = rollout_loss(
            step.student(r),
            step.head,
            hidden,
            step.frozen_head,
            labels,
            reward=step.rewards[r],
            beta=BETA,
            margin=MARGIN,
            anchor_lambda=LAMBDA,
            latents=latents,
            anchor_latents=step.anchors,
            top_k=TOPK,
            global_tokens=global_tokens,
            n_rollouts=len(step.labels),
            world_size=world_size,
            **options,
        )
        assert out.n_tokens == len(labels)
        out.loss.backward()
        for name in logged:
            logged[name].append(getattr(out, name).item())
    return [x.grad for x in step.theta], [x.grad for x in step.phi], logged


@pytest.mark.parametrize("world_size, global_tokens", [(1, 10), (4, 37)])
def test_rollout_loss_is_the_three_phases(world_size: int, global_tokens: int) -> None:
    """One pass of ours: both phases' gradients at rollouts of unequal length, and what they log."""
    step = Step()
    theta, phi, logged = reference_step(step, world_size, global_tokens, FLOOR)
    got_theta, got_phi, got = our_step(step, world_size, global_tokens, chunk_size=2)
    for name, a, b in zip(("body", "head", "composer"), [*got_theta, *got_phi], [*theta, *phi], strict=True):
        assert relative_error(a, b) < 1e-6, name
    for name, values in logged.items():
        assert got[name] == pytest.approx(values, rel=1e-6), name


def test_sure_models_agree_to_1e_3_and_ours_are_exact() -> None:
    """Tails from 1e-11 up: the reference's floor costs up to 1e-3, and the formula without a floor is ours."""
    floored, exact, ours = (run(Step(scale=SURE)) for run in RUNS)
    tails = [1 - x for x in masses(Step(scale=SURE))]
    assert min(tails) < FLOOR < max(tails), "the case should straddle the floor"
    for a, b in ((floored, 1e-3), (exact, 1e-6)):
        for wanted, got in zip((*a[0], *a[1]), (*ours[0], *ours[1]), strict=True):
            assert relative_error(got, wanted) < b
        for name, values in a[2].items():
            assert ours[2][name] == pytest.approx(values, rel=b, abs=b), name
    assert any(relative_error(got, wanted) > 1e-8 for wanted, got in zip(floored[1], ours[1], strict=True))


def masses(step: Step) -> list[float]:
    found: list[float] = []
    for r in range(len(step.labels)):
        probabilities = linear(step.teacher(r)[0], step.frozen_head).softmax(-1)
        found += probabilities.topk(TOPK).values.sum(-1).tolist()
    return found


RUNS: list[Any] = [
    lambda step: reference_step(step, 1, 10, FLOOR),
    lambda step: reference_step(step, 1, 10, 0.0),
    lambda step: our_step(step, 1, 10),
]


def test_rollout_loss_refuses() -> None:
    step = Step()
    hidden, latents = step.teacher(0)
    arguments: dict[str, Any] = dict(
        reward=1.0,
        beta=BETA,
        margin=MARGIN,
        anchor_lambda=LAMBDA,
        latents=latents,
        anchor_latents=step.anchors,
        top_k=TOPK,
        global_tokens=10,
        n_rollouts=2,
    )
    student, head, frozen, labels = step.student(0), step.head, step.frozen_head, step.labels[0]
    with pytest.raises(ValueError, match=r"\(7,\).*\(6,\)"):  # the reference would cut the longer side
        rollout_loss(student, head, hidden[1:], frozen, labels, **arguments)
    with pytest.raises(ValueError, match="no supervised tokens"):
        rollout_loss(student[:0], head, hidden[:0], frozen, labels[:0], **arguments)
    with pytest.raises(ValueError, match="-100"):
        rollout_loss(
            student, head, hidden, frozen, labels.index_fill(0, torch.tensor([2]), -100), **arguments
        )
    arguments["anchor_latents"] = step.anchors[1:]
    with pytest.raises(ValueError, match=r"latents.*\(3, 8\).*\(2, 8\)"):
        rollout_loss(student, head, hidden, frozen, labels, **arguments)
