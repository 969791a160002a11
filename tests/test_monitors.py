"""Monitors: their readings are what they say, and a run with them is bit-equal to one without."""

import math
import random
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch.nn import functional as F

from lopd_fast.bank import Experience, ExperienceBank
from lopd_fast.batch import StepMetrics
from lopd_fast.build import Parts
from lopd_fast.envs.base import Task
from lopd_fast.monitors import LOW_GAP, Monitors, rewards_by_group, step_gap, teacher_reward, undisturbed
from lopd_fast.retrieval import negatives
from lopd_fast.trainer import Trainer

OFF = ["monitor.gap_every=0", "monitor.reward_every=0"]
OF_MONITORS = {"teacher_gap", "teacher_reward", "reward_gap"}
OF_TIME = {"seconds", "phases", "peak_mib", "tokens_per_second"}


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


class Drawing(tiny.ParityEnvironment):
    """An environment that draws from every global generator as an episode starts."""

    def start(self, task: Task) -> tiny.ParityEpisode:
        draw()
        return super().start(task)


def train(*words: str, steps: int = 3) -> tuple[Parts, list[StepMetrics], Trainer]:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    parts = tiny.parts("objective.beta_init=0.3", "train.steps=6", *words, environment=Drawing())
    tiny.stir([value for value in tiny.learning(parts).values()], size=0.05)
    parts.composer.freeze_anchor()
    trainer = Trainer(parts, parts.environment.tasks("train", 5, 0), say=lambda line: None)
    return parts, [trainer.run_step() for _ in range(steps)], trainer


def test_a_run_with_monitors_is_bit_equal_to_one_without():
    on, watched, on_trainer = train("monitor.reward_every=2", "monitor.gap_every=2")
    next_of_on = draw()
    off, alone, off_trainer = train(*OFF)
    assert draw() == next_of_on
    for name in OF_MONITORS:
        assert [math.isfinite(getattr(metrics, name)) for metrics in watched] == [True, False, True], name
    for metrics in watched:
        assert metrics.phases["monitors"] > 0
    for mine, other in zip(watched, alone, strict=True):
        left = {
            name: value
            for name, value in asdict(mine).items()
            if name not in OF_MONITORS | OF_TIME | {"messages"}
        }
        assert left == {name: asdict(other)[name] for name in left}
        assert all(math.isnan(getattr(other, name)) for name in OF_MONITORS)
    for (name, tensor), bare in zip(tiny.learning(on).items(), tiny.learning(off).values(), strict=True):
        assert torch.equal(tensor, bare), name
    for group, tensors in on_trainer.tensors().items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, off_trainer.tensors()[group][name]), name
    assert on.bank.experiences == off.bank.experiences and on_trainer.beta == off_trainer.beta
    assert on.backbone.role_name == off.backbone.role_name
    anchors = [parts.composer.state() for parts in (on, off)]
    assert anchors[0].keys() == anchors[1].keys()


def test_generators_are_as_before_after_an_error_too():
    def states() -> list[Any]:
        return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]  # pyright: ignore

    before = states()
    with pytest.raises(ZeroDivisionError), undisturbed():
        draw()
        assert states() != before
        _ = 1 / 0
    assert states() == before


# --- the gap -----------------------------------------------------------------------------------------------------


def by_hand(parts: Parts, rollout: Any, experiences: list[Experience]) -> torch.Tensor:
    """Log-probs (T, V) of the teacher at the student's tokens, without packing."""
    (latents,) = parts.composer([(rollout.task.text, experiences)])
    ids, at = parts.renderer.prompt(rollout.messages, len(latents))
    embeddings = parts.backbone.embed(torch.tensor([ids + rollout.response_ids])).clone()
    embeddings[0, at : at + len(latents)] = latents
    with parts.backbone.role("teacher"):
        logits = parts.backbone.model(inputs_embeds=embeddings).logits[0]
    rows = torch.tensor(rollout.student_mask).nonzero()[:, 0] + len(ids) - 1
    return F.log_softmax(logits[rows].double(), -1)


@torch.no_grad()
@pytest.mark.parametrize("budget", [100_000, 1])
def test_the_gap_is_the_divergence_of_the_two_teachers(budget: int):
    parts = tiny.parts(f"train.micro_batch_tokens={budget}")
    tiny.stir([value for value in tiny.learning(parts).values()], size=0.3)
    e = parts.bank.experiences
    rollouts = [
        tiny.rollout(1, [1, 1, 0, 1], 1.0, [e[0], e[1]]),
        tiny.rollout(2, [1, 1], 1.0, []),  # nothing to compare
        tiny.rollout(3, [1] * 6, 0.0, [e[3]]),
        tiny.rollout(4, [1] * 3, 0.0, [e[2]]),  # one more than is asked for
    ]
    tasks, shown = [r.task for r in rollouts], [r.experiences for r in rollouts]
    other = negatives(parts.bank, tasks, shown, seed=5, most=2)
    assert [len(found) for found in other] == [2, 0, 1, 0]
    values = []
    for rollout, found in ((rollouts[0], other[0]), (rollouts[2], other[2])):
        positive, negative = (
            by_hand(parts, rollout, shown[rollouts.index(rollout)]),
            by_hand(parts, rollout, found),
        )
        values.append((positive.exp() * (positive - negative)).sum(-1))
    expected = float(torch.cat(values).mean())
    found = step_gap(parts, rollouts, most=2, seed=5)
    assert expected > 1e-3 and found == pytest.approx(expected, rel=2e-2) and found < expected
    assert math.isnan(step_gap(parts, rollouts[1:2], most=2, seed=5))


def test_negatives_are_of_another_group_and_of_another_task_where_there_is_one_group():
    bank = ExperienceBank(tiny.HashEncoder())
    bank.add([Experience(f"a{i}", f"Ask {i}", f"x{i}", 1.0, group="a") for i in range(5)])
    tasks = [Task("t0", "Ask 0", group="a"), Task("t9", "Ask 9", group="b"), Task("t1", " Ask 1", group="a")]
    shown = [bank.experiences[2:4], bank.experiences[:2], []]
    seen = set()
    for seed in range(30):
        alone, other, none = negatives(bank, tasks, shown, seed=seed, most=9)
        assert {item.id for item in alone} == {"a1", "a4"}, "neither shown, nor the task itself"
        assert len({item.id for item in other}) == 2 and not {item.id for item in other} & {"a0", "a1"}
        assert none == []
        seen |= {item.id for item in other}
    assert seen == {"a2", "a3", "a4"}
    bank.add([Experience("b0", "Tell", "y", 1.0, group="b")])
    found = negatives(bank, tasks[:2], shown[:2], seed=0, most=9)
    assert [item.id for item in found[0]] == ["b0"] and all(item.group == "a" for item in found[1])
    assert negatives(bank, tasks[:2], shown[:2], seed=0, most=1)[1] == []
    alone = ExperienceBank(tiny.HashEncoder())
    alone.add(bank.experiences[:1])
    assert negatives(alone, tasks[:1], [bank.experiences[1:2]], seed=0, most=1) == [[]], (
        "the task's own alone"
    )


def test_a_low_gap_is_said_once_until_it_has_been_higher(monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    monitors = Monitors(tiny.parts(), said.append)
    for step, gap in enumerate([0.3, 0.09, math.nan, 0.05, 0.2, 0.01]):
        monitors._warn(gap, step)
    assert len(said) == 2 and said[0].startswith("warning: step 2:") and "0.090 nats" in said[0]
    assert "step 6" in said[1] and LOW_GAP == 0.1


def test_what_is_said_in_a_step_is_in_its_metrics():
    _, metrics, _ = train("loss.k=1", steps=2)
    assert any("top-1 hold only" in line for line in metrics[1].messages)
    assert all("step 2" in line or "top-1" in line for line in metrics[1].messages), "of that step alone"


# --- rewards -----------------------------------------------------------------------------------------------------


def test_the_reward_gap_is_of_the_same_tasks(monkeypatch: pytest.MonkeyPatch):
    parts = tiny.parts("monitor.reward_every=4", "monitor.reward_tasks=2", "monitor.gap_every=0")
    e = parts.bank.experiences
    rollouts = [tiny.rollout(n, [1], reward, [e[n % 4]]) for n, reward in ((1, 1.0), (2, 0.5), (3, 0.0))]
    asked: list[Any] = []

    def act(model: Any, environment: Any, tasks: Any, sampling: Any, *, latents: Any, **rest: Any) -> Any:
        asked.append((parts.backbone.role_name, [task.id for task in tasks], [len(x) for x in latents]))
        assert sampling.temperature == 0.7 and not torch.is_grad_enabled()
        return [tiny.rollout(n, [1], 1.0) for n in range(len(tasks))]

    monkeypatch.setattr(parts.engine, "rollouts", act)
    monitors = Monitors(parts, print)
    assert monitors.read(rollouts, 0).reward_gap == 1.0 - 0.75
    assert math.isnan(monitors.read(rollouts, 3).reward_gap) and monitors.read(rollouts, 4).reward_gap == 0.25
    assert asked == [("teacher", ["t1", "t2"], [3, 3])] * 2


def test_the_teacher_acts_with_its_latents():
    """A teacher that was moved far by other latents does otherwise."""
    parts = tiny.parts("rollout.max_new_tokens=4")
    tasks = parts.environment.tasks("train", 8, 0)
    rollouts = [tiny.rollout(1, [1], 1.0, parts.bank.experiences[:1]) for _ in tasks]
    for rollout, task in zip(rollouts, tasks, strict=True):
        rollout.task = task
    reward = teacher_reward(parts, rollouts, seed=3)
    assert 0 < reward < 1
    assert reward == teacher_reward(parts, rollouts, seed=3)


def test_without_latents_there_is_nothing_to_read():
    parts = tiny.parts("objective.use_latents=false")
    readings = Monitors(parts, print).read([tiny.rollout(1, [1], 1.0, parts.bank.experiences[:1])], 0)
    assert all(math.isnan(value) for value in asdict(readings).values())


def test_rewards_by_group():
    def of(*pairs: tuple[str, float]) -> dict[str, float]:
        rollouts = [tiny.rollout(n, [1], reward) for n, (_, reward) in enumerate(pairs)]
        for rollout, (group, _) in zip(rollouts, pairs, strict=True):
            rollout.task = Task("t", "x", group=group)
        return rewards_by_group(rollouts)

    assert of(("b", 1.0), ("a", 0.0), ("b", 0.0)) == {"a": 0.0, "b": 0.5}
    assert of(("", 1.0), ("", 0.0)) == {}
    assert of(*((str(n), 1.0) for n in range(9))) == {}
