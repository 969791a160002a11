"""Whole runs: stopped, killed and resumed to the same bits; their folder."""

import base64
import errno
import gc
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

from lopd_fast import checkpoint, cold_start, runs, trainer
from lopd_fast.checkpoint import latest_good, load_checkpoint
from lopd_fast.cold_start import ColdStartMetrics
from lopd_fast.console import Stages
from lopd_fast.envs.base import Environment
from lopd_fast.errors import UserError
from lopd_fast.metrics import read_metrics
from lopd_fast.pipeline import Pipeline, Results
from lopd_fast.rollout.hf import HFRollout
from lopd_fast.runs import Run, StepHook, Stopped
from lopd_fast.trainer import Trainer

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
