"""What runs are built from, how they explore, and what they retrieve."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from test_runs import run_in

from lopd_fast import backbone
from lopd_fast import build as building
from lopd_fast.bank import Experience
from lopd_fast.build import build, build_environment
from lopd_fast.config import EnvironmentConfig
from lopd_fast.envs.base import Task
from lopd_fast.envs.lookup import LookupEnvironment
from lopd_fast.errors import UserError
from lopd_fast.retrieval import retrieve
from lopd_fast.trainer import Trainer
from lopd_fast.trajectories import load_trajectories, save_trajectories

# --- exploring ---------------------------------------------------------------------------------------------------


def test_seeds_and_successes_are_the_first_experiences(tmp_path: Path):
    run = run_in(tmp_path)
    run.open(resume=False)
    tasks = run.parts.environment.tasks("train", 6, 0)
    run.seed(tasks[:2])
    sources = [item.source for item in run.parts.bank.experiences]
    assert sources == ["seed"] * 2
    seed = next(iter(run.pool.values()))
    assert seed.response_ids[-1] == tiny.END and all(seed.student_mask)
    text = run.parts.renderer.tokenizer.decode(seed.response_ids[:-1])
    assert text == seed.action == run.parts.environment.solution(tasks[0])  # pyright: ignore
    found = run.explore(tasks)
    assert 0 < found and len(run.pool) <= 2 + found and len(run.parts.bank) == len(run.pool)
    assert run.parts.backbone.role_name == "teacher"

    rollouts = load_trajectories(tmp_path / "trajectories.jsonl")
    assert rollouts == list(run.pool.values())


class Impossible(tiny.ParityEnvironment):
    def solution(self, task: Task) -> str:
        return "odd"

    def start(self, task: Task) -> Any:
        episode = super().start(task)
        episode.turns_left = 5
        return episode


def test_seeds_that_cannot_be_and_attempts_that_all_fail_are_said(tmp_path: Path):
    lookup = LookupEnvironment()
    with pytest.raises(UserError, match="explore.seeds=1, but the environment lookup has no solutions"):
        run_in(tmp_path, environment=lookup).seed(lookup.tasks("train", 1, 0))
    run = run_in(tmp_path, environment=Impossible())
    tasks = run.parts.environment.tasks("train", 3, 0)
    with pytest.raises(UserError, match="solution of task train/0/0 has reward 0.0, not 1"):
        run.seed(tasks)
    with pytest.raises(UserError, match="None of 3 attempts succeeded"):
        run.explore(tasks)


# --- tasks of a step ---------------------------------------------------------------------------------------------


def test_a_step_samples_every_task_as_often_as_asked():
    parts = tiny.parts("train.tasks_per_step=2", "train.rollouts_per_task=2", "retrieval.neighbours=2")
    rollouts = Trainer(parts, parts.environment.tasks("train", 5, 0)).sample()
    ids = [rollout.task.id for rollout in rollouts]
    assert len(ids) == 4 and ids[0] == ids[1] and ids[2] == ids[3] and ids[0] != ids[2]
    assert all(len(rollout.experiences) == 2 for rollout in rollouts)
    assert rollouts[0].experiences == rollouts[1].experiences


# --- files and retrieval -----------------------------------------------------------------------------------------


def test_trajectories_come_back_as_they_were(tmp_path: Path):
    rollouts = [tiny.rollout(1, [1, 0, 1], 1.0, text="zwölf ✓\u2028"), tiny.rollout(2, [1], 0.25)]
    rollouts[0].steps = [{"action": "a\nb", "observation": "é"}]
    rollouts[1].truncated = True
    save_trajectories(rollouts, tmp_path / "t.jsonl")
    assert load_trajectories(tmp_path / "t.jsonl") == rollouts
    assert [path.name for path in tmp_path.iterdir()] == ["t.jsonl"]


@pytest.mark.parametrize(
    "field", ["task", "messages", "response_ids", "student_mask", "reward", "steps", "truncated"]
)
def test_a_field_that_is_missing_is_named(field: str, tmp_path: Path):
    path = tmp_path / "t.jsonl"
    save_trajectories([tiny.rollout(1, [1], 1.0), tiny.rollout(2, [1], 1.0)], path)
    lines = path.read_text().splitlines()
    line = json.loads(lines[1])
    del line[field]
    path.write_text(f"{lines[0]}\n{json.dumps(line)}\n")
    with pytest.raises(UserError, match=f"t.jsonl, line 2: a trajectory needs task, .*'{field}'"):
        load_trajectories(path)
    with pytest.raises(UserError, match="There are no trajectories at"):
        load_trajectories(tmp_path / "none.jsonl")


def test_retrieval_is_of_other_tasks_and_of_the_groups_that_are_allowed():
    parts = tiny.parts(bank=6)
    bank, tasks = parts.bank, [Task("a", "Say old 2.", "g0"), Task("b", "Say new.", "g1")]
    everything = {item.id for item in bank.experiences}

    def found(*words: str, seed: int = 0, groups: list[set[str]] | None = None) -> list[list[Experience]]:
        return retrieve(bank, tasks, tiny.config(*words).retrieval, seed=seed, groups=groups)

    for shuffle in ("retrieval.shuffle=false", "retrieval.shuffle=true"):
        all_of = found(shuffle, "retrieval.neighbours=9")
        assert {item.id for item in all_of[0]} == everything - {"e2"}
        assert {item.id for item in all_of[1]} == everything
        own = found(shuffle, "retrieval.neighbours=9", "retrieval.within_group=true")
        assert {item.id for item in own[0]} == {"e0", "e4"} and {item.id for item in own[1]} == {
            "e1",
            "e3",
            "e5",
        }
        given = found(
            shuffle, "retrieval.neighbours=9", "retrieval.within_group=true", groups=[{"g1"}, {"g0"}]
        )
        assert {item.group for item in given[0]} == {"g1"} and {item.group for item in given[1]} == {"g0"}
        with_self = found(shuffle, "retrieval.neighbours=9", "retrieval.allow_self=true")
        assert {item.id for item in with_self[0]} == everything
        assert [len(items) for items in found(shuffle)] == [2, 2] and found(shuffle) == found(shuffle)
    assert found(seed=1) == found(seed=2)  # the nearest are the nearest
    draws = [str(found("retrieval.shuffle=true", seed=seed)) for seed in range(5)]
    assert len(set(draws)) > 1


# --- building ----------------------------------------------------------------------------------------------------


def test_parts_are_built_from_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(building, "SentenceEncoder", lambda *names, **options: tiny.HashEncoder())
    folder = tiny.save_model(tmp_path / "model")
    words = [f"model.path={folder}", "model.dtype=float32", "model.device=cpu", "environment.name=lookup"]
    built = [build(tiny.config(*words, f"train.seed={seed}")) for seed in (0, 0, 1)]
    first, again, other = (tiny.learning(parts) for parts in built)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["qformer/latents"], other["qformer/latents"])
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad(), built[0].student.policy() as policy:
        torch.testing.assert_close(policy(ids).logits, tiny.model()(ids).logits)
    assert len(built[0].bank) == 0 and isinstance(built[0].environment, LookupEnvironment)
    plain = built[0].renderer.template_options
    thinking = build(tiny.config(*words, "model.template_options.enable_thinking=true")).renderer
    assert plain == {} and thinking.template_options == {"enable_thinking": True}

    weights = (folder / "model.safetensors").read_bytes()
    for damaged in (b"", weights[:200]):
        (folder / "model.safetensors").write_bytes(damaged)
        with pytest.raises(UserError, match="The model at .*/model cannot be loaded: "):
            build(tiny.config(*words))
    (folder / "model.safetensors").write_bytes(weights)
    for word, said in (
        ("model.device=cuda:9", "model.device=cuda:9 cannot be used here"),
        ("model.device=foo", "model.device=foo cannot be used here"),
        ("model.attention=foo", "The model at .* cannot be loaded: .*foo"),
        ("composer.heads=7", "The composer cannot be built: .*7"),
    ):
        with pytest.raises(UserError, match=said):
            build(tiny.config(*words, word))
    wide = tiny.tokenizer()
    wide.add_tokens([f"<new{i}>" for i in range(50)])
    wide.save_pretrained(folder)
    with pytest.raises(UserError, match="knows 325 tokens but the model at .* has embeddings for 288"):
        build(tiny.config(*words))
    bare = tiny.tokenizer("")
    bare.chat_template = None
    (folder / "chat_template.jinja").unlink()
    bare.save_pretrained(folder)
    with pytest.raises(UserError, match="no chat template"):
        build(tiny.config(*words))


@pytest.mark.parametrize("switch", [False, True])
def test_remote_code_is_one_switch(switch: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[bool] = []

    def encoder(*names: str, trust_remote_code: bool, **options: Any) -> tiny.HashEncoder:
        asked.append(trust_remote_code)
        return tiny.HashEncoder()

    monkeypatch.setattr(building, "SentenceEncoder", encoder)
    for kind in (backbone.AutoModelForCausalLM, backbone.AutoTokenizer):
        inner = kind.from_pretrained

        def load(*names: str, trust_remote_code: bool, inner: Any = inner, **options: Any) -> Any:
            asked.append(trust_remote_code)
            return inner(*names, **options)

        monkeypatch.setattr(kind, "from_pretrained", load)
    words = [f"model.path={tiny.save_model(tmp_path)}", "model.dtype=float32", "environment.name=lookup"]
    build(tiny.config(*words, *(["model.trust_remote_code=true"] if switch else [])))
    assert asked == [switch] * 3


def test_an_environment_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "mine.py").write_text(
        "class Mine:\n    name, max_turns = 'mine', 2\n    def __init__(self, size=1):\n        self.size = size\n"
        "    def tasks(self, split, count, seed): ...\n    def start(self, task): ...\nclass Half:\n    name = 'half'\n"
    )
    monkeypatch.chdir(tmp_path)
    found: Any = build_environment(EnvironmentConfig("mine:Mine", {"size": 3}))
    assert type(found).__name__ == "Mine" and found.size == 3 and "" not in sys.path
    for name, options, said in (
        ("mine:Mine", {"sise": 3}, "environment.options do not fit mine:Mine: .*sise"),
        ("mine:Half", {}, "mine:Half lacks max_turns, tasks, start"),
        ("mine:None_", {}, "mine:None_ cannot be imported: .*None_"),
        ("absent:Mine", {}, "absent:Mine cannot be imported: No module named 'absent'"),
    ):
        with pytest.raises(UserError, match=said):
            build_environment(EnvironmentConfig(name, options))


def test_a_wrong_environment_is_said_before_anything_is_loaded():
    with pytest.raises(UserError, match="no environment 'lokup'; did you mean 'lookup'"):
        build(tiny.config("environment.name=lokup"))
    with pytest.raises(UserError, match="the environments are staff_database"):
        build_environment(EnvironmentConfig())
    with pytest.raises(UserError, match="environment.options do not fit lookup: .*persons"):
        build_environment(EnvironmentConfig(name="lookup", options={"persons": 3}))
    assert build_environment(EnvironmentConfig(name="lookup", options={"people": 3})).people == 3  # pyright: ignore
