"""Whole runs: stopped, killed and resumed to the same bits; their folder; what they are built from and retrieve."""

import base64
import errno
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from lopd_fast import backbone, checkpoint, cold_start, runs, trainer
from lopd_fast import build as building
from lopd_fast.bank import Experience
from lopd_fast.build import build, build_environment
from lopd_fast.checkpoint import latest_good, load_checkpoint
from lopd_fast.cold_start import ColdStartMetrics
from lopd_fast.config import EnvironmentConfig
from lopd_fast.console import Stages
from lopd_fast.envs.base import Environment, Task
from lopd_fast.envs.lookup import LookupEnvironment
from lopd_fast.errors import UserError
from lopd_fast.metrics import read_metrics
from lopd_fast.pipeline import Pipeline, Results
from lopd_fast.retrieval import retrieve
from lopd_fast.rollout.hf import HFRollout
from lopd_fast.runs import Run, StepHook, Stopped
from lopd_fast.trainer import Trainer
from lopd_fast.trajectories import load_trajectories, save_trajectories

# Everything that depends on the step or on what came before is in use.
WORDS = [
    *["train.steps=6", "cold_start.steps=4", "train.checkpoint_every=2", "train.keep_checkpoints=9"],
    *["loss.first_divergence=forward_kl", "loss.first_share=0.4", "objective.teacher_warmup=0.2"],
    *[
        "optim.decay_share=1",
        "optim.warmup_steps=2",
        "objective.beta_init=0.3",
        "objective.dual_lr=0.05",
        "rollout.max_new_tokens=4",
    ],
]


def silent(line: str) -> None:
    pass


def run_in(
    out: Path, *words: str, environment: Environment | None = None, say: Callable[[str], None] = silent
) -> Run:
    parts = tiny.parts(f"train.out={out}", *WORDS, *words, environment=environment, bank=0)
    return Run(parts, say=say)


def go(
    out: Path, hook: StepHook | None = None, resume: bool = False, say: Callable[[str], None] = silent
) -> Run:
    """All stages, as the command line runs them, in parts of their own."""
    run = run_in(out, say=say)
    tasks = run.parts.environment.tasks("train", 5, 0)
    stage = "explore"
    if run.open(resume):
        stage = run.restore()
    else:
        run.seed(tasks[:2])
        run.explore(tasks)
    if stage != "distil":
        run.cold_start(hook)
    run.distil(tasks, hook)
    return run


def outcome(out: Path) -> dict[str, Any]:
    """Everything that a run leaves, but for times."""
    checkpoint = latest_good(out / "checkpoints")
    assert checkpoint is not None
    lines = {}
    for folder in (out, out / "cold_start"):
        lines[folder.name if folder != out else "distil"] = read_metrics(folder / "metrics.jsonl")
    for values in lines.values():
        for line in values:
            for name in ("seconds", "phases", "peak_mib", "tokens_per_second"):
                line.pop(name, None)
    bank = sorted(path.name for path in (checkpoint.path / "bank").rglob("*"))
    files = {name: (checkpoint.path / "bank" / name).read_bytes() for name in bank if name != "bank"}
    return {"tensors": checkpoint.tensors, "state": checkpoint.state, "metrics": lines, "bank": files}


def assert_same_outcome(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["metrics"] == expected["metrics"]
    assert found["state"] == expected["state"] and found["bank"] == expected["bank"]
    assert found["tensors"].keys() == expected["tensors"].keys()
    for group, tensors in expected["tensors"].items():
        assert tensors.keys() == found["tensors"][group].keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, found["tensors"][group][name]), f"{group} {name}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupts."""
    out = tmp_path_factory.mktemp("whole")
    go(out)
    return out


def at(stage: str, step: int, act: Any) -> StepHook:
    """A hook that acts after one step of one stage."""

    def hook(metrics: Any) -> None:
        name = "cold_start" if isinstance(metrics, ColdStartMetrics) else "distil"
        if (name, metrics.step) == (stage, step):
            act()

    return hook


def ask_to_stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed(out: Path, dies: Callable[[pytest.MonkeyPatch], StepHook | None], resume: bool) -> None:
    """Go on with a run, in a process of its own, until it is killed where `dies` says so."""
    child = os.fork()
    if child == 0:
        try:
            go(out, dies(pytest.MonkeyPatch()), resume)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def on_call(owner: Any, name: str, count: int, half: bool = False) -> Callable[[pytest.MonkeyPatch], None]:
    """Die as `owner.name` is called for the `count`-th time; `half`: when it has written half of its file."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        inner, left = getattr(owner, name), [count]

        def call(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0 and half:
                inner(*arguments, **options)
                os.truncate(arguments[1], arguments[1].stat().st_size // 2)
            if left[0] == 0:
                die()
            return inner(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    return patch


# --- stopping and resuming ---------------------------------------------------------------------------------------


def test_a_run_learns_something_to_compare(whole: Path):
    result = outcome(whole)
    assert [line["step"] for line in result["metrics"]["distil"]] == [1, 2, 3, 4, 5, 6]
    assert [line["divergence"] for line in result["metrics"]["distil"]] == ["forward_kl"] * 3 + [
        "reverse_kl"
    ] * 3
    assert len({line["beta"] for line in result["metrics"]["distil"]}) > 3
    early = load_checkpoint(whole / "checkpoints" / "step-000006").tensors["student"]
    assert all(not torch.equal(early[name], tensor) for name, tensor in result["tensors"]["student"].items())
    assert result["metrics"]["distil"][-1]["bank_size"] > result["metrics"]["distil"][0]["bank_size"]


def test_six_steps_are_three_and_a_resume_and_three(whole: Path, tmp_path: Path):
    """Asked to stop in the cold start and in the third step of distillation, resumed in fresh parts each time."""
    with pytest.raises(Stopped):
        go(tmp_path, at("cold_start", 3, ask_to_stop))
    with pytest.raises(Stopped):
        go(tmp_path, at("distil", 3, ask_to_stop), resume=True)
    go(tmp_path, resume=True)
    assert_same_outcome(outcome(tmp_path), outcome(whole))


def test_a_killed_run_resumes_from_its_last_checkpoint(whole: Path, tmp_path: Path):
    """SIGKILL at each of these instants in turn; those of a write hit its thread, while the training goes on."""
    instants = [
        lambda _: at("cold_start", 3, die),
        on_call(checkpoint, "save_file", 1, half=True),
        lambda _: at("distil", 1, die),  # before distillation has a checkpoint
        on_call(Trainer, "backward", 2),
        on_call(trainer, "optimizer_step", 4),  # theta has stepped, phi and beta have not
        on_call(checkpoint, "_put_in_place", 1),
        on_call(checkpoint, "_rotate", 1),
        on_call(HFRollout, "rollouts", 1),
        on_call(checkpoint, "save_file", 3, half=True),
        on_call(runs, "write_bank", 1),
    ]
    for number, instant in enumerate(instants):
        killed(tmp_path, instant, resume=number > 0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    go(tmp_path, resume=True)
    assert_same_outcome(outcome(tmp_path), outcome(whole))


@pytest.mark.parametrize(("stage", "step"), [("cold_start", 2), ("distil", 2)])
def test_a_stop_asked_for_while_saving_is_not_lost(
    stage: str, step: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    inner = Run._save

    def save(run: Run, number: int, tensors: Any, state: dict[str, Any]) -> None:
        inner(run, number, tensors, state)
        if (state["stage"], state["stage_step"]) == (stage, step):
            ask_to_stop()

    monkeypatch.setattr(Run, "_save", save)
    with pytest.raises(Stopped):
        go(tmp_path)
    found = latest_good(tmp_path / "checkpoints")
    assert found is not None and (found.state["stage"], found.state["stage_step"]) == (stage, step)
    monkeypatch.undo()
    go(tmp_path, resume=True)
    assert_same_outcome(outcome(tmp_path), outcome(whole))


def test_a_full_disk_costs_no_step_while_the_run_goes_on(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Checkpoints of step 4, 6 and 8 cannot be written; what was said and what is kept tell so, and no number."""
    said: list[str] = []
    full = {4, 6, 8}
    inner = checkpoint._write

    def write(folder: Path, *arguments: Any) -> None:
        if int(folder.name[6:12]) in full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        inner(folder, *arguments)

    monkeypatch.setattr(checkpoint, "_write", write)
    go(tmp_path, say=said.append)
    assert_same_outcome(outcome(tmp_path), outcome(whole))
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == [
        "step-000002",
        "step-000010",
    ]
    said = [line.split(" cannot")[0] for line in said if "cannot be saved" in line]
    assert said == [f"warning: Step {step}" for step in (4, 6, 8)]
    full.add(10)
    out = tmp_path / "end"
    with pytest.raises(UserError, match="Step 10 cannot be saved in .* the disk has no room"):
        go(out)
    full.discard(4)
    with pytest.raises(UserError, match="Step 8 cannot be saved"):  # not Stopped, which says that it is saved
        go(tmp_path / "stopped", at("distil", 4, ask_to_stop))
    full.clear()
    go(out, resume=True)  # all over again, from the last step that could be saved
    assert_same_outcome(outcome(out), outcome(whole))


def test_a_run_that_had_too_little_memory_goes_on_from_its_last_checkpoint(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """In step 3 of each stage, saved after 2; the settings that the message names may change as it goes on."""

    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    for stage, owner, name, step in (
        ("cold_start", cold_start, "linear_nll", 2),
        ("distil", trainer, "teacher_hidden", 6),
    ):
        with monkeypatch.context() as patched, pytest.raises(UserError, match="^Out of memory in .*step 3 "):
            go(tmp_path, at(stage, 2, partial(patched.setattr, owner, name, fail)), resume=step > 2)
        assert (tmp_path / "checkpoints" / f"step-{step:06d}" / "state.json").is_file()
    lower = ["train.micro_batch_tokens=64", "rollout.batch_size=2", "model.gradient_checkpointing=true"]
    shutil.copytree(tmp_path, tmp_path / "copy")
    assert run_in(tmp_path / "copy", *lower).open(resume=True)
    go(tmp_path, resume=True)
    assert_same_outcome(outcome(tmp_path), outcome(whole))


def test_a_stop_in_the_last_cold_start_step_is_not_lost(tmp_path: Path):
    with pytest.raises(Stopped):
        go(tmp_path, at("cold_start", 4, ask_to_stop))
    checkpoint = latest_good(tmp_path / "checkpoints")
    assert checkpoint is not None and checkpoint.state == {"stage": "cold_start", "stage_step": 4}
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_folder_is_not_mixed_up_with_another_run(whole: Path, tmp_path: Path):
    out = tmp_path / "copy"
    shutil.copytree(whole, out)
    with pytest.raises(UserError, match="holds an earlier run; go on with it by --resume"):
        run_in(out).open(resume=False)
    with pytest.raises(UserError, match=r"was started with loss.k=5, now it is 7"):
        run_in(out, "loss.k=7").open(resume=True)
    longer = ["train.steps=9", "train.checkpoint_every=1", "train.keep_checkpoints=1"]
    assert run_in(out, *longer).open(resume=True)
    with pytest.raises(UserError, match="There is no run to go on with in .*/new"):
        run_in(tmp_path / "new").open(resume=True)
    assert not (tmp_path / "new").exists()
    run_in(tmp_path / "new").open(resume=False)
    assert not run_in(tmp_path / "new").open(
        resume=True
    )  # killed before its first checkpoint: from the start
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text('{"my": "own"}')
    with pytest.raises(UserError, match="mine/config.json is not the configuration of a run"):
        run_in(tmp_path / "mine").open(resume=False)
    for file in out.glob("checkpoints/*/*.safetensors"):
        file.write_bytes(b"x")
    for resume in (True, False):
        with pytest.raises(UserError, match="None of the . checkpoints in .* can be read"):
            run_in(out, "optim.lr=0.123").open(resume)
    assert "0.123" not in (out / "config.json").read_text()


def test_two_processes_are_not_at_work_in_one_folder(tmp_path: Path):
    run_in(tmp_path).open(resume=False)
    holder = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"
    command = [sys.executable, "-c", holder, str(tmp_path / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None and other.stdout is not None
        gc.collect()  # the run above is over
        other.stdout.readline()
        with pytest.raises(UserError, match="Another process is at work in"):
            run_in(tmp_path).open(resume=True)
        other.stdin.write(b"\n")
        other.stdin.close()
    assert not run_in(tmp_path).open(resume=True)


def test_a_longer_run_is_evaluated_anew(whole: Path, tmp_path: Path):
    out = tmp_path / "copy"
    shutil.copytree(whole, out)

    def pipeline(*words: str) -> Pipeline:
        found = Pipeline(run_in(out, *words).parts, Stages(Console(quiet=True)))
        assert found.open(resume=True)
        found.distil()
        return found

    first = pipeline()
    first.evaluate_student("after")
    assert "student_after_greedy" in pipeline().results.values  # no step was taken
    assert "student_after_greedy" not in pipeline("train.steps=7").results.values
    again = Results(out / "results.json")
    again.load()
    assert "student_after_greedy" not in again.values


def test_a_run_that_could_take_no_step_is_not_a_success(tmp_path: Path):
    run = run_in(tmp_path, "rollout.max_tokens=2")
    run.open(resume=False)
    tasks = run.parts.environment.tasks("train", 5, 0)
    run.seed(tasks[:2])
    with pytest.raises(UserError, match="All 6 steps were skipped"):
        run.distil(tasks)


def test_finish_leaves_curves_and_a_plain_student(whole: Path, tmp_path: Path):
    out = tmp_path / "copy"
    shutil.copytree(whole, out)
    run = run_in(out)
    run.open(resume=True)
    assert run.restore() == "distil"
    run.distil(run.parts.environment.tasks("train", 5, 0))  # there is nothing left to do
    folder = run.finish()
    picture = (out / "curves.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    page = (out / "report.html").read_text()
    assert base64.b64encode(picture).decode() in page and "train.tasks_per_step" in page
    assert all(
        f"<td>{phase}</td>" in page for phase in ("rollout", "compose", "teacher", "student", "backward")
    )
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad(), run.parts.student.policy() as policy:
        found = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")(ids).logits
        torch.testing.assert_close(found, policy(ids).logits)
        assert float((found - tiny.model()(ids).logits).abs().max()) > 1e-3


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
