"""phi_0: the NLL of successful trajectories under a teacher that reads other experiences, and what it changes."""

import math

import pytest
import tiny
import torch
from restated import Restatement
from torch import Tensor
from torch.nn import functional as F

from lopd_fast import cold_start
from lopd_fast.backbone import Head
from lopd_fast.bank import Experience
from lopd_fast.batch import Rollout
from lopd_fast.build import Parts
from lopd_fast.checkpoint import optimizer_tensors
from lopd_fast.cold_start import ColdStart, draw_evenly, linear_nll
from lopd_fast.errors import UserError


def trajectories(count: int = 4) -> list[Rollout]:
    """Of unequal length, some with observations in between."""
    masks = [[1, 1, 1], [1], [1, 0, 0, 1, 1], [1, 1, 0, 1]]
    return [tiny.rollout(number, masks[number % 4], 1.0) for number in range(count)]


def stage_of(
    parts: Parts, rollouts: list[Rollout], said: list[str] | None = None, micro_batch_tokens: int = 8192
) -> ColdStart:
    return ColdStart(
        parts.backbone,
        parts.composer,
        parts.renderer,
        parts.bank,
        rollouts,
        parts.config.cold_start,
        parts.config.retrieval,
        seed=0,
        micro_batch_tokens=micro_batch_tokens,
        say=(said if said is not None else []).append,
    )


@pytest.mark.parametrize("micro_batch_tokens", [8192, 150, 1])
def test_nll_and_its_gradient_are_those_of_one_trajectory_at_a_time(micro_batch_tokens: int):
    parts = tiny.parts(kind="qwen3", tie=False)
    tiny.stir([value for value in tiny.learning(parts).values()], seed=1, size=0.05)
    parts.composer.freeze_anchor()
    stage = stage_of(parts, trajectories(), micro_batch_tokens=micro_batch_tokens)
    loss = stage.backward(stage.examples)

    restated = Restatement(parts, tiny.model("qwen3", tie=False))
    terms = []
    for rollout, hits in stage.examples:
        assert len(hits) == 2
        rollout.experiences = hits
        logits = restated._teacher_logits(rollout, restated._latents(rollout, restated.leaves))
        mine = torch.tensor(rollout.student_mask)
        terms.append(
            F.cross_entropy(logits[mine], torch.tensor(rollout.response_ids)[mine], reduction="none")
        )
    expected = torch.cat(terms).mean()
    expected.backward()
    assert loss == pytest.approx(float(expected), rel=1e-6)
    for name, tensor in tiny.learning(parts).items():
        wanted = restated.leaves[name].grad
        if name.startswith("student/"):
            assert tensor.grad is None and wanted is None
        else:
            assert tensor.grad is not None and wanted is not None
            error = float((tensor.grad.double() - wanted).norm() / wanted.norm())
            assert error < 1e-5, f"{name}: {error}"


HEADS = [(None, 1.0, None), ("bias", 1.0, None), (None, 0.25, None), ("bias", 0.5, 3.0)]


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize(("bias", "scale", "softcap"), HEADS)
def test_linear_nll(
    bias: str | None, scale: float, softcap: float | None, in_parts: bool, monkeypatch: pytest.MonkeyPatch
):
    if in_parts:  # of two rows
        monkeypatch.setattr(cold_start, "LOGITS_BYTES", 2 * 4 * 11)
    hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(11, 8)
    offset = torch.randn(11) if bias else None
    targets = torch.tensor([0, 10, 3, 3, 7])
    loss = linear_nll(hidden, Head(weight, offset, scale, softcap), targets)
    (gradient,) = torch.autograd.grad(loss, hidden)

    exact = hidden.detach().double().requires_grad_()
    logits = scale * (exact @ weight.double().T + (0 if offset is None else offset.double()))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    expected = -logits.log_softmax(-1)[torch.arange(5), targets].mean()
    (wanted,) = torch.autograd.grad(expected, exact)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    torch.testing.assert_close(gradient.double(), wanted, rtol=1e-4, atol=1e-6)


def test_it_learns_and_changes_phi_alone():
    parts = tiny.parts("cold_start.steps=12")
    stage = stage_of(parts, trajectories())
    everything: dict[str, Tensor] = {
        name: value for name, value in parts.backbone.named_parameters() if ".encoder." not in name
    }
    frozen, phi = tiny.copies(everything), tiny.copies(tiny.learning(parts))
    metrics = [stage.run_step() for _ in range(12)]
    assert metrics[-1].nll < metrics[0].nll - 0.3
    assert [m.step for m in metrics] == list(range(1, 13)) and all(m.grad_norm > 0 for m in metrics)
    assert all(torch.equal(everything[name], frozen[name]) for name in frozen)
    after = tiny.learning(parts)
    moved = {name for name in phi if not torch.equal(phi[name], after[name])}
    assert moved == {name for name in phi if not name.startswith("student/")}


def test_a_trajectory_never_reads_its_own_experience():
    parts = tiny.parts(bank=0)
    rollouts = trajectories(3)
    parts.bank.add([Experience("", rollout.task.text, "look", 1.0) for rollout in rollouts])
    stage = stage_of(parts, rollouts)
    for rollout, hits in stage.examples:
        assert [item.task for item in hits] and rollout.task.text not in [item.task for item in hits]


def test_without_an_experience_of_another_task_there_is_nothing_to_learn_from():
    parts = tiny.parts(bank=0)
    rollouts = trajectories(1)
    with pytest.raises(UserError, match="bank is empty"):
        stage_of(parts, rollouts)
    parts.bank.add([Experience("", rollouts[0].task.text, "look", 1.0)])
    with pytest.raises(UserError, match="None of the 1 trajectories.*retrieval.allow_self"):
        stage_of(parts, rollouts)


def test_batches_follow_the_seed_and_the_step():
    def read(seed: int, steps: int) -> list[list[str]]:
        stage = stage_of(tiny.parts("cold_start.batch_size=2"), trajectories())
        stage.seed = seed
        batches: list[list[str]] = []
        inner = stage.backward

        def backward(examples) -> float:
            batches.append([rollout.task.id for rollout, _ in examples])
            return inner(examples)

        stage.backward = backward  # pyright: ignore[reportAttributeAccessIssue]
        for _ in range(steps):
            stage.run_step()
        return batches

    first = read(0, 4)
    assert first == read(0, 4) and first != read(1, 4)
    assert all(len(set(batch)) == 2 for batch in first) and len({tuple(batch) for batch in first}) > 1


def test_groups_take_turns_until_one_has_no_more():
    groups = list("aaaaaaaaaaaabbb")
    draws = [draw_evenly(groups, 6, seed) for seed in range(30)]
    assert all(sorted(groups[i] for i in drawn) == list("aaabbb") and len(set(drawn)) == 6 for drawn in draws)
    assert {i for drawn in draws for i in drawn} == set(range(15)) and draws[1] == draw_evenly(groups, 6, 1)
    assert sorted(groups[i] for i in draw_evenly(groups, 9, 0)) == list("aaaaaabbb")
    assert sorted(draw_evenly(groups, 99, 0)) == list(range(15))
    few = [draw_evenly(list("abcd"), 2, seed) for seed in range(30)]
    assert all(len(set(drawn)) == 2 for drawn in few) and {i for drawn in few for i in drawn} == {0, 1, 2, 3}


def test_a_step_that_is_not_finite_is_skipped():
    parts, said = tiny.parts(), []
    stage = stage_of(parts, trajectories(), said)
    stage.run_step()
    phi = tiny.copies(tiny.learning(parts))
    state = tiny.copies(optimizer_tensors(stage.optimizer))
    hook = parts.composer.qformer.latents.register_hook(lambda gradient: gradient * math.nan)
    metrics = stage.run_step()
    hook.remove()
    assert metrics.skipped and stage.step == 2 and "cold-start step 2 skipped" in said[0]
    assert all(torch.equal(phi[name], value) for name, value in tiny.learning(parts).items())
    assert all(torch.equal(state[name], value) for name, value in optimizer_tensors(stage.optimizer).items())
    assert not stage.run_step().skipped
