"""The vLLM engine against a stand-in of vLLM's interface: the same tokens as transformers, never stale weights."""

import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import vllm_restated
from peft import PeftModel

from lopd_fast.build import Parts, build
from lopd_fast.envs.base import Task
from lopd_fast.errors import UserError
from lopd_fast.evaluation import teacher_rollouts
from lopd_fast.plan.make import make_plan
from lopd_fast.processes import World
from lopd_fast.rollout import vllm as engine_module
from lopd_fast.rollout.hf import HFRollout
from lopd_fast.rollout.sampling import GREEDY, Sampling
from lopd_fast.rollout.vllm import VLLMRollout, check_vllm
from lopd_fast.trainer import Trainer

WARM = Sampling(0.7, 0.95, 20)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder, with the stand-in in vLLM's place."""
    vllm_restated.install(monkeypatch)
    return tiny.save_model(tmp_path / "model")


def parts_of(folder: Path, *words: str, turns: int = 1) -> tuple[Parts, Any]:
    """Parts whose engine is vLLM's, and the stand-in inside."""
    parts = tiny.parts(
        "rollout.engine=vllm", f"model.path={folder}", *words, environment=tiny.ParityEnvironment(turns)
    )
    parts.engine = VLLMRollout(parts.renderer, parts.config, parts.backbone)
    return parts, vllm_restated.made[-1]


def tasks_of(count: int) -> list[Task]:
    return [Task(f"t{i}", "Say ab" + " and on" * (3 * i % 7) + ".") for i in range(count)]


def ids(
    parts: Parts, engine: Any, tasks: list[Task], sampling: Sampling = GREEDY, seed: int = 0
) -> list[list[int]]:
    with engine.policy(parts.student) as policy:
        rollouts = engine.rollouts(policy, parts.environment, tasks, sampling, seed=seed)
    return [rollout.response_ids for rollout in rollouts]


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_the_student_of_this_very_step_is_sampled(folder: Path, mode: str):
    """Weights reach vLLM anew at every step, and leave nothing behind in the base's."""
    parts, llm = parts_of(folder, f"student.mode={mode}", turns=2)
    reference, tasks = HFRollout(parts.renderer, parts.config.rollout), tasks_of(4)
    seen = []
    for step in range(3):
        seen.append(ids(parts, parts.engine, tasks))
        assert seen[-1] == ids(parts, reference, tasks)
        learning = [value for name, value in tiny.learning(parts).items() if name.startswith("student/")]
        tiny.stir(learning, seed=step, size=0.2 if mode == "lora" else 0.05)
    assert seen[0] != seen[1] != seen[2]
    with parts.engine.base(parts.backbone) as base:
        plain = parts.engine.rollouts(base, parts.environment, tasks, GREEDY, seed=0)
    assert [rollout.response_ids for rollout in plain] == seen[0], "a fresh student is the base"
    assert llm.mapped == set() and set(llm.levels) == {1 if mode == "lora" else 2}
    if mode == "lora":
        assert list(llm.adapters) == [3] and llm.max_rank == 8  # rank 2, padded to what vLLM has
        assert len(list(Path(parts.engine._adapters.name).iterdir())) == 1  # pyright: ignore


def test_later_turns_follow_the_very_ids_of_earlier_ones(folder: Path):
    parts, llm = parts_of(folder, "rollout.max_new_tokens=25", turns=3)
    hot = Sampling(1.5)
    with parts.engine.policy(parts.student) as policy:
        rollouts = parts.engine.rollouts(policy, parts.environment, tasks_of(6), hot, seed=1)
    assert max(len(rollout.steps) for rollout in rollouts) > 1
    asked = {(tuple(prompt), params.max_tokens) for prompt, params in llm.prompts}
    for rollout in rollouts:
        prompt = parts.renderer.prompt(rollout.messages)[0]
        mask = [False, *rollout.student_mask]
        starts = [at for at in range(len(rollout.student_mask)) if mask[at + 1] and not mask[at]]
        assert len(starts) == len(rollout.steps)
        for start in starts:  # each action was asked for with everything before it, as it was sampled
            assert ((*prompt, *rollout.response_ids[:start]), 25) in asked
        assert rollout.truncated or rollout.response_ids[-1] == tiny.END
    assert len({params.seed for _, params in llm.prompts}) == len(llm.prompts)
    assert llm.mapped == set()


def test_the_behaviour_policy_and_seeds(folder: Path):
    parts, llm = parts_of(folder, "rollout.max_new_tokens=5")
    task = tasks_of(1)[0]
    first, again, other = (ids(parts, parts.engine, [task] * 6, WARM, seed) for seed in (3, 3, 4))
    assert first == again != other
    assert len({tuple(answer) for answer in first}) > 1, "attempts at one task have seeds of their own"
    for _, params in llm.prompts:
        assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.7, 0.95, 20, 5)
        assert params.stop_token_ids == [tiny.END]
    assert len({params.seed for _, params in llm.prompts}) == 12
    short = ids(parts, parts.engine, [task] * 6, WARM, 3)[:2]
    assert ids(parts, parts.engine, [task] * 2, WARM, 3) == short, "whoever else is asked"
    before = torch.get_rng_state()
    ids(parts, parts.engine, [task], WARM, 5)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_teacher_acts_by_transformers(folder: Path):
    parts, llm = parts_of(folder)
    tasks, shown = tasks_of(3), [parts.bank.experiences[:2]] * 3
    reference = HFRollout(parts.renderer, parts.config.rollout)
    found = [
        teacher_rollouts(
            parts.backbone, parts.composer, engine, parts.environment, tasks, shown, WARM, seed=2
        )
        for engine in (parts.engine, reference)
    ]
    assert found[0] == found[1] and llm.prompts == []


def test_steps_and_exploring_run_on_it(folder: Path):
    parts, llm = parts_of(folder, "rollout.max_new_tokens=3", "monitor.reward_every=1")
    parts.composer.freeze_anchor()
    trainer = Trainer(parts, parts.environment.tasks("train", 5, 0), say=lambda line: None)
    for _ in range(2):
        metrics = trainer.run_step()
        assert not metrics.skipped and metrics.tokens > 0 and metrics.reward_gap == metrics.reward_gap
        assert llm.mapped == set(), "asleep while the step learns"
    assert list(llm.adapters) == [2]


def test_it_sleeps_after_an_error_too_and_a_long_prompt_is_said(folder: Path):
    parts, llm = parts_of(folder, "rollout.max_tokens=30")
    with pytest.raises(
        UserError, match=r"Task t1 has a prompt of \d+ tokens, .* rollout.max_tokens=30; raise it"
    ):
        ids(parts, parts.engine, tasks_of(2))
    assert llm.mapped == set()


def test_a_saved_adapter_is_one_that_peft_reads(folder: Path, tmp_path: Path):
    parts = tiny.parts()
    tiny.stir([value for value in tiny.learning(parts).values()], size=0.3)
    parts.backbone.save_adapter("student", tmp_path / "adapter")
    files = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= files
    loaded: Any = PeftModel.from_pretrained(tiny.model(), str(tmp_path / "adapter"))
    tokens = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad(), parts.student.policy() as policy:
        torch.testing.assert_close(loaded(tokens).logits, policy(tokens).logits)
        assert float((loaded(tokens).logits - tiny.model()(tokens).logits).abs().max()) > 1e-3


def test_what_cannot_run_is_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch):
    words = ["rollout.engine=vllm", f"model.path={folder}", "model.device=cpu", "train.trackers=[]"]
    with pytest.raises(
        UserError, match="vLLM does not start with rollout.vllm_memory=0.9: Free .*utilization.$"
    ):
        parts_of(folder, "rollout.vllm_memory=0.9")
    monkeypatch.setattr(engine_module.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(UserError, match="needs a CUDA device"):
        build(tiny.config(*words))
    monkeypatch.setattr(engine_module, "pick_device", lambda name: torch.device("cuda"))
    check_vllm(tiny.config(*words))
    with pytest.raises(UserError, match="student.lora.rank=600, but vLLM takes 512 at most"):
        check_vllm(tiny.config(*words, "student.lora.rank=600"))
    with pytest.raises(UserError, match="samples in one process"):
        build(tiny.config(*words), World(launched=True))
    monkeypatch.setattr(
        engine_module.importlib.util,
        "find_spec",
        lambda name: None,
    )
    with pytest.raises(UserError, match=r"needs the package vllm, .* run: pip install 'lopd-fast\[vllm\]'"):
        build(tiny.config(*words))
    unused: Any = None
    with pytest.raises(UserError, match="There is no plan for rollout.engine=vllm"):
        make_plan(tiny.config(*words), unused, unused, unused, torch.float32)
    assert "vllm" in sys.modules, "the stand-in"
