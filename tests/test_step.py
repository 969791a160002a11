"""One LOPD step against the paper's formulas in plain autograd, and what a step does when something is wrong."""

import math
from collections.abc import Callable

import pytest
import tiny
import torch
from restated import Restatement
from torch import Tensor, nn

from lopd_fast.backbone import Backbone
from lopd_fast.batch import Rollout
from lopd_fast.build import Parts
from lopd_fast.checkpoint import optimizer_tensors
from lopd_fast.objective import anchor_sum, dual_update
from lopd_fast.optimizers import schedule_factor
from lopd_fast.pack import pack_step
from lopd_fast.trainer import Trainer


def ragged_rollouts() -> list[Rollout]:
    """Rewards on both sides of 1/2; none, one and many experiences, two of them asked for twice with one task."""
    e = tiny.experiences()
    return [
        tiny.rollout(1, [1, 1, 1, 1, 1], 1.0, [e[0], e[1]], text="Say one."),
        tiny.rollout(2, [1, 1, 0, 0, 1], 0.0, [e[1], e[0], e[3]]),
        tiny.rollout(3, [1], 0.25, []),
        tiny.rollout(4, [1, 1, 1], 0.0, [e[2]]),
        tiny.rollout(5, [1, 1, 1, 0, 1, 1, 1], 1.0, [e[1], e[0]], text="Say one."),
    ]


def moved_parts(*words: str, kind: str = "llama", tie: bool = True) -> Parts:
    """Parts after some learning: no tensor at its first value, and the composer away from its anchor."""
    parts = tiny.parts(*words, kind=kind, tie=tie)
    tiny.stir([value for value in tiny.learning(parts).values()], seed=1, size=0.05)
    parts.composer.freeze_anchor()
    phi = [value for name, value in tiny.learning(parts).items() if not name.startswith("student/")]
    tiny.stir(phi, seed=2, size=0.05)
    return parts


def fresh_parts(*words: str) -> Parts:
    """Parts at their first values: the student is still the backbone, and the composer its anchor."""
    parts = tiny.parts(*words)
    parts.composer.freeze_anchor()
    return parts


def trainer_of(parts: Parts, said: list[str] | None = None) -> Trainer:
    tasks = parts.environment.tasks("train", 4, 0)
    return Trainer(parts, tasks, say=(said if said is not None else []).append)


def gradients(parts: Parts) -> dict[str, Tensor]:
    """The gradients that a backward left, taken off."""
    found = {
        name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        for name, tensor in tiny.learning(parts).items()
    }
    for tensor in tiny.learning(parts).values():
        tensor.grad = None
    return found


def doubled(parts: Parts) -> Parts:
    """The same parts in fp64, where only the norms of a model's layers are still taken in fp32."""
    parts.backbone.double()
    parts.composer.double()
    if parts.student._own is not None:
        parts.student._own.double()
    return parts


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        error = float((found[name].double() - tensor).norm())
        assert error <= tolerance * float(tensor.norm()), f"{name}: {error} of {float(tensor.norm())}"


def joined(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """All gradients of theta, and all of phi, as one vector each."""
    sides = ("theta", "phi")
    return {
        side: torch.cat(
            [x.flatten() for name, x in gradients.items() if name.startswith("student/") == theta]
        )
        for side, theta in zip(sides, (True, False), strict=True)
    }


# --- the gradients -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl"])
@pytest.mark.parametrize("mode", ["lora", "full"])
@pytest.mark.parametrize(("kind", "tie"), [("llama", True), ("qwen3", False), ("olmo3", False)])
def test_gradients_are_those_of_the_paper(
    kind: str, tie: bool, mode: str, divergence: str, monkeypatch: pytest.MonkeyPatch
):
    """However the rollouts are packed and whatever is recomputed."""
    words = [f"student.mode={mode}", f"loss.divergence={divergence}", "objective.beta_init=0.7"]
    parts = moved_parts(*words, kind=kind, tie=tie)
    recomputing = moved_parts(*words, "model.gradient_checkpointing=true", kind=kind, tie=tie)
    rollouts = ragged_rollouts()
    restatement = Restatement(parts, tiny.model(kind, tie=tie))
    expected = restatement.step(rollouts, beta=0.7, divergence=divergence)
    # Every tensor is put to the test.
    assert min(float(tensor.norm()) for tensor in expected.gradients.values()) > 1e-7

    # Tokens of a micro-batch: all rollouts at once, two at a time, each alone.
    for run, budget, share in (
        (parts, 100_000, True),
        (recomputing, 200, True),
        (parts, 200, False),
        (recomputing, 1, False),
    ):
        run.config.train.micro_batch_tokens = budget
        with monkeypatch.context() as patch:
            if not share:
                patch.setattr(Backbone, "shares_prefixes", False)
            totals = trainer_of(run).backward(rollouts)
        found = gradients(run)
        assert_close(joined(found), joined(expected.gradients))
        assert_close(found, expected.gradients, tolerance=3e-5)  # of one tensor rounding may take that much
        assert float(totals.loss) == pytest.approx(expected.loss, rel=1e-5)
        assert float(totals.anchor) == pytest.approx(expected.anchor, rel=1e-5)
        for name in ("kl", "delta", "student_mass", "teacher_mass", "surprise"):
            mean = float(getattr(totals, name)) / 18
            assert mean == pytest.approx(getattr(expected, name), rel=1e-5, abs=1e-6), name


def test_one_backward_gives_the_gradients_of_the_reference_s_two():
    """It updates theta with the teacher detached, then phi by a second teacher pass with the student detached."""
    parts = moved_parts("objective.beta_init=0.7")
    expected = Restatement(parts, tiny.model()).step(ragged_rollouts(), beta=0.7, backwards=2)
    trainer_of(parts).backward(ragged_rollouts())
    assert_close(gradients(parts), expected.gradients)


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl"])
@pytest.mark.parametrize("mode", ["lora", "full"])
@pytest.mark.parametrize(("kind", "tie"), [("llama", True), ("qwen3", False), ("olmo3", False)])
def test_gradients_in_double_precision(kind: str, tie: bool, mode: str, divergence: str):
    """Every tensor, ten times nearer than fp32 rounding lets it come."""
    words = [f"student.mode={mode}", f"loss.divergence={divergence}", "objective.beta_init=0.7"]
    parts = doubled(moved_parts(*words, "train.micro_batch_tokens=200", kind=kind, tie=tie))
    expected = Restatement(parts, tiny.model(kind, tie=tie)).step(
        ragged_rollouts(), beta=0.7, divergence=divergence
    )
    trainer_of(parts).backward(ragged_rollouts())
    assert_close(gradients(parts), expected.gradients, tolerance=1e-6)


def test_update_clips_each_side_and_steps_each_part_at_its_own_rate():
    words = ["optim.lr=1e-3", "optim.encoder_lr=2e-3", "optim.qformer_lr=3e-3", "optim.clip=0.05"]
    parts = moved_parts(*words, "optim.warmup_steps=3", "objective.beta_init=0.7")
    trainer = trainer_of(parts)
    before = tiny.copies(tiny.learning(parts))
    trainer.backward(ragged_rollouts())
    grads = gradients(parts)
    metrics = trainer.update(ragged_rollouts())
    assert metrics.student_grad_norm > 0.05 and metrics.composer_grad_norm > 0.05  # the clip has work to do

    rates = {"student": 1e-3, "encoder": 2e-3, "qformer": 3e-3}
    for sides in (["student"], ["encoder", "qformer"]):
        own = {name: nn.Parameter(value) for name, value in before.items() if name.split("/")[0] in sides}
        for name, parameter in own.items():
            parameter.grad = grads[name].clone()
        nn.utils.clip_grad_norm_(own.values(), 0.05)
        torch.optim.AdamW(
            [{"params": [own[name]], "lr": rates[name.split("/")[0]] / 4} for name in own], weight_decay=0.0
        ).step()
        for name, parameter in own.items():
            torch.testing.assert_close(tiny.learning(parts)[name], parameter, rtol=0, atol=1e-7)


def test_schedules_of_the_learning_rate():
    optim = tiny.config("optim.decay_share=1", "optim.warmup_steps=1").optim
    assert [schedule_factor(optim, step, 4) for step in range(4)] == [0.5, 0.75, 0.5, 0.25]
    optim = tiny.config("optim.decay_share=0.5").optim
    assert [schedule_factor(optim, step, 8) for step in range(8)] == [1.0] * 5 + [0.75, 0.5, 0.25]
    assert [schedule_factor(tiny.config().optim, step, 4) for step in range(4)] == [1.0] * 4


# --- margin, dual variable, anchor -------------------------------------------------------------------------------


def test_dual_update_values():
    assert dual_update(0.0, delta=-0.15, margin=0.05, dual_lr=0.5) == pytest.approx(0.1)
    assert dual_update(0.1, delta=0.15, margin=0.05, dual_lr=0.5) == pytest.approx(0.05)
    assert dual_update(0.1, delta=1.0, margin=0.05, dual_lr=0.5) == 0.0


def test_a_step_reports_its_parts_and_beta_follows_the_margin():
    parts = moved_parts("objective.beta_init=0.7")
    expected = Restatement(parts, tiny.model()).step(ragged_rollouts(), beta=0.7)
    trainer = trainer_of(parts)
    metrics = trainer.update(ragged_rollouts())
    assert metrics.beta == 0.7 and metrics.delta == pytest.approx(expected.delta, rel=1e-5)
    assert metrics.loss == pytest.approx(expected.loss, rel=1e-5)
    assert metrics.kl == pytest.approx(expected.kl, rel=1e-5)
    assert metrics.anchor == pytest.approx(expected.anchor, rel=1e-5)
    assert metrics.student_mass == pytest.approx(expected.student_mass, rel=1e-5)
    assert metrics.teacher_mass == pytest.approx(expected.teacher_mass, rel=1e-5)
    assert metrics.entropy == pytest.approx(expected.surprise, rel=1e-5)
    assert (metrics.tokens, metrics.response_tokens, metrics.reward) == (18, 21 / 5, 0.45)
    assert trainer.beta == pytest.approx(max(0.0, 0.7 + 0.5 * (0.05 - expected.delta)), rel=1e-6)


def test_a_step_says_where_its_time_went():
    trainer = trainer_of(moved_parts())
    metrics = trainer.run_step()
    phases = {"rollout", "monitors", "compose", "teacher", "student", "loss", "backward", "optimizers"}
    assert metrics.phases.keys() == phases and all(seconds > 0 for seconds in metrics.phases.values())
    assert sum(metrics.phases.values()) <= metrics.seconds
    assert metrics.peak_mib > 50  # torch alone takes more


def test_anchor_sum_values():
    latents = [torch.tensor([[1.0, 2.0]]), torch.zeros(0, 2), torch.tensor([[0.0, 3.0]])]
    anchors = [torch.tensor([[0.0, 2.0]]), torch.zeros(0, 2), torch.tensor([[0.0, 1.0]])]
    assert float(anchor_sum(latents, anchors)) == 5.0


# --- what is trained when ----------------------------------------------------------------------------------------


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    """Which sides have a tensor with another bit."""
    return {name.split("/")[0] for name in before if not torch.equal(before[name], after[name])}


def test_warm_up_trains_phi_alone():
    parts = moved_parts("objective.teacher_warmup=0.5", "train.steps=6")  # the first 3 of 6 steps
    trainer = trainer_of(parts)
    trained = []
    for _ in range(4):
        before = tiny.copies(tiny.learning(parts))
        trainer.update(ragged_rollouts())
        trained.append(changed(before, tiny.learning(parts)))
    phi = {"encoder", "qformer"}
    assert trained == [phi, phi, phi, phi | {"student"}]


def test_frozen_composer_stays_bit_equal():
    parts = moved_parts("objective.freeze_composer=true", "objective.beta_init=0.7", "optim.weight_decay=0.1")
    before = tiny.copies(tiny.learning(parts))
    metrics = trainer_of(parts).update(ragged_rollouts())
    assert changed(before, tiny.learning(parts)) == {"student"}
    assert metrics.composer_grad_norm == 0.0 and not metrics.skipped


def test_without_latents_the_teacher_sees_the_task_alone():
    parts = moved_parts("objective.use_latents=false")
    tiny.stir(
        [value for name, value in tiny.learning(parts).items()], seed=9, size=0.5
    )  # phi does not matter
    bare = [
        tiny.rollout(n, r.student_mask, r.reward, text=r.task.text)
        for n, r in enumerate(ragged_rollouts(), 1)
    ]
    expected = Restatement(parts, tiny.model()).step(bare, beta=0.0)
    before = tiny.copies(tiny.learning(parts))
    metrics = trainer_of(parts).update(ragged_rollouts())
    assert metrics.kl == pytest.approx(expected.kl, rel=1e-5)
    assert changed(before, tiny.learning(parts)) == {"student"}


def test_first_divergence_is_scheduled():
    words = ["loss.first_divergence=forward_kl", "loss.first_share=0.5", "train.steps=6"]
    parts = moved_parts(*words)
    trainer = trainer_of(parts)
    kinds = []
    for step in range(4):
        if step in (0, 3):
            divergence = ["forward_kl", "reverse_kl"][step > 0]
            expected = Restatement(parts, tiny.model()).step(
                ragged_rollouts(), trainer.beta, divergence=divergence
            )
            metrics = trainer.update(ragged_rollouts())
            assert metrics.kl == pytest.approx(expected.kl, rel=1e-5)
        else:
            metrics = trainer.update(ragged_rollouts())
        kinds.append(metrics.divergence)
    assert kinds == ["forward_kl"] * 3 + ["reverse_kl"]


# --- teacher and student mean the same tokens --------------------------------------------------------------------


@pytest.mark.parametrize("please", [0, 30])
@pytest.mark.parametrize("length", [1, 5])
def test_teacher_equals_student(length: int, please: int):
    parts = fresh_parts()  # a fresh LoRA changes nothing
    rollouts = [
        tiny.rollout(1, [1] * length, 1.0, text="x" + " please" * please),
        tiny.rollout(2, [1] * 5, 0.0, text="another one"),
    ]
    totals = trainer_of(parts).backward(rollouts)
    assert float(totals.loss) < 1e-6 and float(totals.kl) < 1e-6
    assert max(float(value.norm()) for value in gradients(parts).values()) < 1e-6


def test_a_teacher_shifted_by_one_position_is_noticed():
    parts = fresh_parts()
    batch = pack_step([tiny.rollout(1, [1] * 5, 1.0)], [0], parts.renderer)
    batch.teacher.rows -= 1
    result = trainer_of(parts)._distill(batch, [torch.zeros(0, 32)], num_items=5)
    assert float(result.loss) > 0.1


def test_tool_tokens_are_read_but_not_learned_from():
    """Logits at [1, 1, 0, 0, 1]'s zeros change nothing: other targets there, the same loss and gradients."""
    parts = moved_parts()
    trainer = trainer_of(parts)
    last = tiny.rollout(2, [1, 1, 0, 0], 1.0)  # nothing supervised comes after its tool tokens
    values = []
    for token in (5, 200):
        last.response_ids[2:] = [token, token]
        totals = trainer.backward([last])
        values.append((float(totals.loss), gradients(parts)))
    assert values[0][0] == values[1][0]
    for name, tensor in values[0][1].items():
        assert torch.equal(tensor, values[1][1][name]), name


# --- when something is wrong -------------------------------------------------------------------------------------


def poison_gradient(parts: Parts) -> Callable[[], None]:
    parameter = parts.student.trainable()[0][1]
    return parameter.register_hook(lambda gradient: gradient * math.nan).remove


def poison_hidden(parts: Parts) -> Callable[[], None]:
    hidden = parts.student.hidden
    parts.student.hidden = lambda side: hidden(side) * math.inf

    def mend() -> None:
        parts.student.hidden = hidden

    return mend


@pytest.mark.parametrize("poison", [poison_gradient, poison_hidden])
def test_a_step_that_is_not_finite_is_skipped(poison: Callable[[Parts], Callable[[], None]]):
    parts = moved_parts("objective.beta_init=0.3")
    said: list[str] = []
    trainer = trainer_of(parts, said)
    trainer.update(ragged_rollouts())
    states = [tiny.copies(optimizer_tensors(o)) for o in (trainer.theta_optimizer, trainer.phi_optimizer)]
    before, beta = tiny.copies(tiny.learning(parts)), trainer.beta

    mend = poison(parts)
    metrics = trainer.update(ragged_rollouts())
    mend()
    assert metrics.skipped and trainer.skipped == 1 and trainer.step == 2 and trainer.beta == beta
    assert "step 2 skipped" in said[-1] and "nan" in said[-1]
    assert changed(before, tiny.learning(parts)) == set()
    for state, optimizer in zip(states, (trainer.theta_optimizer, trainer.phi_optimizer), strict=True):
        after = optimizer_tensors(optimizer)
        assert state.keys() == after.keys() and all(torch.equal(state[key], after[key]) for key in state)

    assert not trainer.update(ragged_rollouts()).skipped  # nothing of it is left in the gradients
    assert all(bool(value.isfinite().all()) for value in tiny.learning(parts).values())


def test_no_token_to_learn_from_is_a_skipped_step():
    parts = moved_parts("rollout.max_tokens=20")
    said: list[str] = []
    metrics = trainer_of(parts, said).update(ragged_rollouts())
    assert metrics.skipped and metrics.tokens == 0 and "holds a token to learn from" in said[0]


def test_a_first_gradient_of_zero_is_said():
    parts = fresh_parts()
    said: list[str] = []
    trainer_of(parts, said).update(
        [tiny.rollout(1, [1, 1], 1.0)]
    )  # no experience: the teacher is the student
    assert any("gradient is exactly 0" in line for line in said)


def test_a_low_teacher_mass_is_said():
    parts = moved_parts("loss.k=1")
    said: list[str] = []
    metrics = trainer_of(parts, said).update(ragged_rollouts())
    assert metrics.teacher_mass < 0.5
    assert any(f"top-1 hold only {metrics.teacher_mass:.2f}" in line for line in said)


def test_what_learns_is_the_same_before_and_after_a_step():
    parts = moved_parts()

    def names() -> list[str]:
        modules = (parts.backbone, parts.composer)
        return [
            name for module in modules for name, value in module.named_parameters() if value.requires_grad
        ]

    before, role = names(), parts.backbone.role_name
    trainer = trainer_of(parts)
    trainer.run_step()
    assert names() == before and parts.backbone.role_name == role
    assert sorted(map(id, trainer.theta + trainer.phi)) == sorted(map(id, tiny.learning(parts).values()))
    assert len(before) == len(tiny.learning(parts))
