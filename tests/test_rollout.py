"""Rollouts: sampled ids end to end, the same for the same seed and whoever else is in the batch, within the limits."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, TopKLogitsWarper, TopPLogitsWarper

from lopd_fast.bank import ExperienceBank
from lopd_fast.batch import Rollout
from lopd_fast.envs.base import Message, StepResult, Task
from lopd_fast.envs.lookup import LookupEnvironment
from lopd_fast.evaluation import pass_rate
from lopd_fast.explore import explore, replay, successful
from lopd_fast.render import SLOT_HEADER, Renderer
from lopd_fast.rollout.hf import HFRollout
from lopd_fast.rollout.sampling import GREEDY, NucleusOfTopK, Sampling

WARM = Sampling(0.7, 0.95, 20)


def engine_of(*words: str) -> HFRollout:
    return HFRollout(Renderer(tiny.tokenizer()), tiny.config(*words).rollout)


def tasks_of(count: int) -> list[Task]:
    """Tasks whose prompts have unequal lengths."""
    return [Task(f"t{i}", "Say ab" + " and on" * (3 * i % 7) + ".") for i in range(count)]


def ids_of(rollouts: Sequence[Rollout]) -> list[list[int]]:
    return [rollout.response_ids for rollout in rollouts]


# --- sampling ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 0.01])
@pytest.mark.parametrize("top_k", [0, 1, 20, 1000])
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_nucleus_of_top_k_is_what_transformers_does(temperature: float, top_k: int, top_p: float):
    logits = 3 * torch.randn(16, 300)
    ids = torch.zeros(16, 1, dtype=torch.int64)
    warpers = LogitsProcessorList()
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    found = NucleusOfTopK(Sampling(temperature, top_p, top_k))(ids, logits.clone())
    torch.testing.assert_close(found, warpers(ids, logits / temperature), rtol=0, atol=0)  # pyright: ignore


def by_hand(model: PreTrainedModel, embeddings: Tensor, count: int) -> list[int]:
    """Greedy decoding without a cache, a batch or padding; ends with the end token."""
    chosen: list[int] = []
    while len(chosen) < count and tiny.END not in chosen:
        logits = model(inputs_embeds=embeddings).logits[0, -1]
        chosen.append(int(logits.argmax()))
        embeddings = torch.cat([embeddings, model.get_input_embeddings()(torch.tensor([chosen[-1:]]))], dim=1)
    return chosen


@torch.no_grad()
@pytest.mark.parametrize("batch_size", [1, 4])
def test_greedy_is_the_argmax_of_each_alone_with_and_without_latents(batch_size: int):
    """Whoever shares the batch; embeddings give the new tokens alone, ids give prompt and new ones."""
    engine, model, tasks = engine_of(f"rollout.batch_size={batch_size}"), tiny.model(), tasks_of(4)
    renderer, embed = engine.renderer, tiny.model().get_input_embeddings()
    latents = [torch.randn(count, 32) * 0.3 for count in (0, 2, 0, 5)]
    plain = engine.rollouts(model, tiny.ParityEnvironment(), tasks, GREEDY, seed=0)
    spliced = engine.rollouts(model, tiny.ParityEnvironment(), tasks, GREEDY, seed=0, latents=latents)
    for task, vectors, without, given in zip(tasks, latents, plain, spliced, strict=True):
        message = [{"role": "user", "content": task.text}]
        prompt = embed(torch.tensor([renderer.prompt(message)[0]]))
        assert without.response_ids == by_hand(model, prompt, 6)
        if len(vectors):
            ids, at = renderer.prompt(message, len(vectors))
            whole = embed(torch.tensor([ids]))
            prompt = torch.cat([whole[:, :at], vectors[None], whole[:, at + len(vectors) :]], dim=1)
        assert given.response_ids == by_hand(model, prompt, 6)
    assert ids_of(plain) != ids_of(spliced)


def test_order_and_company_change_nothing_when_greedy():
    tasks = tasks_of(5)
    alone = engine_of("rollout.batch_size=1").rollouts(
        tiny.model(), tiny.ParityEnvironment(), tasks, GREEDY, seed=0
    )
    back = engine_of("rollout.batch_size=3").rollouts(
        tiny.model(), tiny.ParityEnvironment(), tasks[::-1], GREEDY, seed=9
    )
    assert ids_of(alone) == ids_of(back[::-1]) and [r.task.id for r in alone] == [t.id for t in tasks]


def test_same_seed_same_rollouts_and_no_other_draw_is_disturbed():
    engine, model, tasks = engine_of("rollout.batch_size=2"), tiny.model(), tasks_of(5)

    def states() -> list[Any]:
        return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]  # pyright: ignore

    before = states()
    first, again, other = (
        ids_of(engine.rollouts(model, tiny.ParityEnvironment(), tasks, WARM, seed=seed)) for seed in (3, 3, 4)
    )
    assert first == again and first != other
    assert states() == before


def test_a_failing_environment_leaves_modes_and_generators_as_they_were():
    class Failing(tiny.ParityEnvironment):
        def start(self, task: Task) -> Any:
            episode = super().start(task)
            episode.step = lambda action: 1 / 0  # pyright: ignore[reportAttributeAccessIssue]
            return episode

    model = tiny.model()
    layers: Any = model.get_decoder().layers
    layers[0].training = True
    modes = [module.training for module in model.modules()]
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError):
        engine_of().rollouts(model, Failing(), tasks_of(2), WARM, seed=0)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), before) and torch.is_grad_enabled()


# --- limits ------------------------------------------------------------------------------------------------------


def test_each_rollout_keeps_to_its_own_room():
    """The longest prompt has room for few tokens; that cuts no other rollout short."""
    tasks = tasks_of(4)
    free = engine_of().rollouts(tiny.model(), tiny.ParityEnvironment(), tasks, GREEDY, seed=0)
    renderer = Renderer(tiny.tokenizer())
    prompts = [len(renderer.prompt([{"role": "user", "content": task.text}])[0]) for task in tasks]
    limit = max(prompts) + 2
    tight = engine_of(f"rollout.max_tokens={limit}").rollouts(
        tiny.model(), tiny.ParityEnvironment(), tasks, GREEDY, seed=0
    )
    assert max(prompts) > sorted(prompts)[-2] + 4  # the others have all the room they need
    for prompt, whole, cut in zip(prompts, free, tight, strict=True):
        assert cut.response_ids == whole.response_ids[: limit - prompt]
        assert cut.truncated == (tiny.END not in cut.response_ids)


def test_turns_stop_at_the_limit_of_tokens():
    renderer = Renderer(tiny.tokenizer())
    for limit in (60, 75, 90, 120):
        engine = engine_of(f"rollout.max_tokens={limit}")
        engine._generate = (
            lambda model, batch, sampling, budget: [  # pyright: ignore[reportAttributeAccessIssue]
                [*renderer._ids("look"), tiny.END][:budget] for _ in batch
            ]
        )
        for rollout in engine.rollouts(tiny.model(), tiny.ParityEnvironment(9), tasks_of(3), GREEDY, seed=0):
            length = len(renderer.prompt(rollout.messages)[0]) + len(rollout.response_ids)
            assert (
                length <= limit or len(rollout.response_ids) == 1
            )  # a prompt that is too long gets one token
            assert rollout.truncated and len(rollout.student_mask) == len(rollout.response_ids)
            assert rollout.student_mask[-1]  # an observation that nothing could answer is not appended


# --- turns -------------------------------------------------------------------------------------------------------


def scripted(engine: HFRollout, actions: dict[str, list[str]]) -> None:
    """Let `engine` answer task id -> texts, one a turn, padded as generate pads."""

    def generate(model: Any, batch: Sequence[Any], sampling: Any, budget: int) -> list[list[int]]:
        answers = []
        for item in batch:
            text = actions[item.rollout.task.id][len(item.rollout.steps)]
            answers.append([*engine.renderer._ids(text), tiny.END])
        longest = max(len(answer) for answer in answers)
        return [answer + [engine.renderer.pad_id] * (longest - len(answer)) for answer in answers]

    engine._generate = generate  # pyright: ignore[reportAttributeAccessIssue]


def test_lookup_episodes_from_end_to_end():
    environment = LookupEnvironment(people=2)
    tasks = environment.tasks("train", 3, 0)
    engine = engine_of("rollout.max_tokens=4096", "rollout.max_new_tokens=200", "rollout.batch_size=2")
    people = [task.data["person"] for task in tasks]
    values = [task.data["records"][task.data["person"]][task.data["field"]] for task in tasks]
    scripts = [
        [f"lookup: {people[0]}", f"answer: {values[0]}"],
        [f"answer: {values[1]}"],  # a guess
        ["hm", "lookup: nobody", f"lookup: {people[2]}", f"answer: {values[2]}"],
    ]
    scripted(engine, {task.id: script for task, script in zip(tasks, scripts, strict=True)})
    heard: list[int] = []
    rollouts = engine.rollouts(tiny.model(), environment, tasks, GREEDY, seed=0, progress=heard.append)

    assert [rollout.reward for rollout in rollouts] == [1.0, 0.0, 1.0] and sum(heard) == 3
    assert [rollout.action for rollout in rollouts] == [script[-1] for script in scripts]
    for rollout, script in zip(rollouts, scripts, strict=True):
        assert [step["action"] for step in rollout.steps] == script and not rollout.truncated
        written = [t for t, mine in zip(rollout.response_ids, rollout.student_mask, strict=True) if mine]
        assert written == [token for text in script for token in [*engine.renderer._ids(text), tiny.END]]
        conversation: list[Message] = list(rollout.messages)
        for step in rollout.steps:
            conversation.append({"role": "assistant", "content": step["action"]})
            conversation.append({"role": "user", "content": step["observation"]})
        whole = engine.renderer.tokenizer.apply_chat_template(conversation[:-1], return_dict=False)
        sequence = engine.renderer.prompt(rollout.messages)[0] + rollout.response_ids
        assert (
            sequence == whole[: len(sequence)] and len(whole) - len(sequence) <= 1
        )  # but for a last line break


def test_an_episode_that_runs_out_of_turns_has_no_reward():
    class Generous(tiny.ParityEnvironment):
        """Would reward the third action, but allows two."""

        def start(self, task: Task) -> Any:
            episode = super().start(task)
            episode.turns_left = 3
            return episode

    engine = engine_of()
    scripted(engine, {"t0": ["ok", "ok", "ok"]})
    (rollout,) = engine.rollouts(tiny.model(), Generous(2), tasks_of(1), GREEDY, seed=0)
    assert rollout.reward == 0.0 and len(rollout.steps) == 2 and rollout.student_mask[-1]


def test_sampled_ids_are_kept_though_their_text_has_another_encoding():
    engine = engine_of()
    a, b, ab = (engine.renderer._ids(text)[0] for text in ("a", "b", "ab"))
    engine._generate = lambda *given: [[a, b, tiny.END, tiny.END, tiny.END]]  # pyright: ignore
    (rollout,) = engine.rollouts(tiny.model(), tiny.ParityEnvironment(), tasks_of(1), GREEDY, seed=0)
    assert rollout.action == "ab" and engine.renderer._ids("ab") == [ab]
    assert rollout.response_ids == [a, b, tiny.END] and rollout.student_mask == [True] * 3
    assert rollout.reward == 1.0 and not rollout.truncated


def test_equal_episodes_are_told_apart():
    """Two attempts at one task by a teacher: every field of the two compares equal, or is a tensor."""
    tasks = [tasks_of(1)[0]] * 3
    latents = [torch.full((2, 32), 0.1) for _ in tasks]
    engine = engine_of()
    scripted(engine, {"t0": ["a", "b"]})
    rollouts = engine.rollouts(
        tiny.model(), tiny.ParityEnvironment(2), tasks, GREEDY, seed=0, latents=latents
    )
    assert [len(rollout.steps) for rollout in rollouts] == [2, 2, 2] and rollouts[0] == rollouts[2]


# --- exploring ---------------------------------------------------------------------------------------------------


class Recorded(tiny.ParityEnvironment):
    """With a system message; remembers nothing else."""

    def start(self, task: Task) -> Any:
        episode = super().start(task)
        episode.messages = [{"role": "system", "content": "Be brief."}, *episode.messages]
        return episode


def test_exploring_shows_earlier_successes_and_keeps_the_plain_prompt():
    parts = tiny.parts(environment=Recorded(), bank=0)
    tasks = parts.environment.tasks("train", 2, 0)
    bank, pool = ExperienceBank(tiny.HashEncoder()), {}
    engine = engine_of()
    scripted(engine, {tasks[0].id: ["abab"], tasks[1].id: ["odd"]})
    settings: dict[str, Any] = dict(retrieval=parts.config.retrieval, shots=2, sampling=GREEDY, seed=0)

    (good,) = explore(tiny.model(), engine, parts.environment, tasks, bank, pool, **settings)
    assert good.task is tasks[0] and len(bank) == 1 and list(pool.values()) == [good]
    assert bank.experiences[0].trace == "abab" and bank.experiences[0].group == "g0"

    scripted(engine, {tasks[0].id: ["ab"], tasks[1].id: ["even"]})
    answer, seen = engine._generate, []

    def spy(model: Any, batch: Sequence[Any], *rest: Any) -> list[list[int]]:
        seen.extend(str(engine.renderer.tokenizer.decode(item.prompt_ids)) for item in batch)
        return answer(model, batch, *rest)

    engine._generate = spy  # pyright: ignore[reportAttributeAccessIssue]
    found = explore(tiny.model(), engine, parts.environment, tasks, bank, pool, **settings)
    shown = "<|im_start|>user\nSay train 0.<|im_end|>\n<|im_start|>assistant\nabab<|im_end|>\n"
    first, second = sorted(seen, key=len)
    assert shown not in first and f"Be brief.<|im_end|>\n{shown}<|im_start|>user\nSay train 1." in second
    assert len(found) == 2 and len(bank) == len(pool) == 3
    for rollout in found:
        assert rollout.messages == list(parts.environment.start(rollout.task).messages)


def test_exploring_ends_for_a_group_that_has_enough():
    parts = tiny.parts(environment=tiny.ParityEnvironment(), bank=0)
    tasks = parts.environment.tasks("train", 6, 0)  # of two groups, taking turns
    bank, pool = ExperienceBank(tiny.HashEncoder()), {}
    settings: dict[str, Any] = dict(
        retrieval=parts.config.retrieval, shots=0, sampling=GREEDY, seed=0, per_group=2
    )
    engine = engine_of()
    first, second = ([task for task in tasks if task.group == group] for group in ("g0", "g1"))
    scripted(engine, {task.id: ["abab" if task in first else "odd"] for task in tasks})
    found = explore(tiny.model(), engine, parts.environment, tasks, bank, pool, **settings)
    assert [rollout.task for rollout in found] == first[:2] and len(pool) == len(bank) == 2

    scripted(engine, {task.id: ["ab"] for task in second})  # a task of the first group has no answer here
    found = explore(tiny.model(), engine, parts.environment, tasks, bank, pool, **settings)
    assert [rollout.task for rollout in found] == second[:2] and len(pool) == 4
    assert explore(tiny.model(), engine, parts.environment, tasks, bank, pool, **settings) == []


def test_a_demonstration_is_a_rollout():
    environment = tiny.ParityEnvironment()
    (task,) = environment.tasks("train", 1, 0)
    rollout = replay(environment, task, "abab", [9, 9, tiny.END])
    assert rollout.reward == 1.0 and rollout.student_mask == [True] * 3 and rollout.action == "abab"
    assert rollout.messages == [{"role": "user", "content": task.text}]


def test_success_is_full_reward_with_something_said():
    def one(reward: float, action: str) -> Rollout:
        return Rollout(Task("t", "x"), [], [1], [True], reward, [{"action": action, "observation": ""}])

    rollouts = [one(1.0, "a"), one(0.5, "b"), one(1.0, " "), Rollout(Task("t", "x"), [], [], [], 1.0)]
    assert successful(rollouts) == rollouts[:1]
    for rollout, group in zip(rollouts, "xxyy", strict=True):
        rollout.task = Task("t", "x", group)
    assert (pass_rate(rollouts), pass_rate(rollouts, "x"), pass_rate(rollouts, "y")) == (0.875, 0.75, 1.0)
    assert np.isnan(pass_rate(rollouts, "z"))


def test_student_rollouts_are_from_the_task_alone():
    parts = tiny.parts()
    tasks = tasks_of(2)
    with parts.student.policy() as model:
        rollouts = parts.engine.rollouts(model, parts.environment, tasks, GREEDY, seed=0)
    assert all(SLOT_HEADER[:10] not in message["content"] for r in rollouts for message in r.messages)
    assert ids_of(rollouts) == ids_of(
        engine_of().rollouts(tiny.model(), parts.environment, tasks, GREEDY, seed=0)
    )


def test_reward_counts_when_the_environment_says_done():

    class Early(tiny.ParityEpisode):
        def step(self, action: str) -> StepResult:
            self.turns_left -= 1
            return StepResult("go on", 1.0, False) if self.turns_left else StepResult("", 0.25, True)

    class Paying(tiny.ParityEnvironment):
        def start(self, task: Task) -> Any:
            return Early([{"role": "user", "content": task.text}], 2)

    engine = engine_of()
    scripted(engine, {"t0": ["a", "b"]})
    (rollout,) = engine.rollouts(tiny.model(), Paying(2), tasks_of(1), GREEDY, seed=0)
    assert rollout.reward == 0.25 and rollout.advantage == -0.5
