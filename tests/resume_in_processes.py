"""What each of two processes checks: steps, and that either number of processes goes on from the other's checkpoint."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import step_in_processes
import tiny
import torch
import torch.distributed as dist

from lopd_fast.checkpoint import latest_checkpoint, load_checkpoint
from lopd_fast.metrics import read_metrics
from lopd_fast.processes import World
from lopd_fast.runs import Run
from lopd_fast.trainer import Trainer

WORDS = ["train.checkpoint_every=1", "cold_start.steps=2", "rollout.max_new_tokens=4", "optim.lr=1e-3"]
MODES = {"lora": [], "full": ["student.mode=full", "model.shard=true"]}
ALONE = World(launched=True)  # one process, whose rollouts draw as those of several do


def go(out: Path, world: World, words: Sequence[str], steps: int, said: list[str] | None = None) -> Run:
    """A run of `steps` steps, from the folder's checkpoint where there is one."""
    parts = tiny.parts(f"train.out={out}", f"train.steps={steps}", *WORDS, *words, world=world, bank=0)
    parts.shard()
    run = Run(parts, say=(said if said is not None else []).append)
    tasks = parts.environment.tasks("train", 5, 0)
    resume = latest_checkpoint(out / "checkpoints") is not None
    world.wait()  # nobody looks for a checkpoint once the first process may write one
    stage = "explore"
    if run.open(resume):
        stage = run.restore()
    else:
        run.seed(tasks[:3])
        run.explore(tasks)
    if stage != "distil":
        run.cold_start()
    run.distil(tasks)
    return run


def check_resume(world: World, folder: Path, words: Sequence[str] = ()) -> None:
    """A next step in one process and in two from the same checkpoint, be it written by two or by one."""
    for name, first in (("by two", world), ("by one", ALONE)):
        source, there = folder / name, folder / f"{name}, then two"
        if first is world or world.first:
            go(source, first, words, 2)
        world.wait()
        if world.first:
            shutil.copytree(source, there)
            shutil.copytree(source, folder / f"{name}, then one")
        world.wait()
        said: list[str] = []
        go(there, world, words, 3, said)
        assert any("saved by 1 process and goes on in 2" in line for line in said) == (first is ALONE), said
        if world.first:
            again = folder / f"{name}, then one"
            go(again, ALONE, words, 3, said)
            assert any("saved by 2 processes and goes on in 1" in line for line in said) == (first is world)
            same_step(again, there)
            if first is world:
                same_bytes(source, folder / f"{name}, again", words)
        world.wait()
    if world.first:
        same_start(folder / "by one", folder / "by two")


def same_start(one: Path, two: Path) -> None:
    """What was explored is the same to the last token, and the cold start begins alike."""
    assert (one / "trajectories.jsonl").read_bytes() == (two / "trajectories.jsonl").read_bytes()
    lines = [read_metrics(out / "cold_start" / "metrics.jsonl") for out in (one, two)]
    for number in ("nll", "grad_norm"):
        step_in_processes.near(lines[1][0][number], lines[0][0][number], f"cold start: {number}")


def same_step(one: Path, two: Path) -> None:
    """The third step's metrics and everything that it leaves, to 1e-5."""
    lines = [read_metrics(out / "metrics.jsonl") for out in (one, two)]
    assert [len(each) for each in lines] == [3, 3]
    for number in step_in_processes.NUMBERS:
        step_in_processes.near(lines[1][-1][number], lines[0][-1][number], number)
    a, b = (load_checkpoint(out / "checkpoints" / "step-000005") for out in (one, two))
    assert a.state | {"processes": 2} == b.state | {"processes": 2} | {"trainer": a.state["trainer"]}
    step_in_processes.near(b.state["trainer"]["beta"], a.state["trainer"]["beta"], "beta")
    for group in a.tensors:
        assert sorted(a.tensors[group]) == sorted(b.tensors[group])
        for name, tensor in a.tensors[group].items():
            step_in_processes.near(b.tensors[group][name], tensor, f"{group} {name}")


def same_bytes(source: Path, target: Path, words: Sequence[str]) -> None:
    """What one process writes of what it read of two is what they wrote."""
    shutil.copytree(source, target)
    before = latest_checkpoint(source / "checkpoints")
    run = go(target, ALONE, words, 2)  # loads, and has no step to take
    trainer = Trainer(run.parts, run.parts.environment.tasks("train", 5, 0))
    assert before is not None
    checkpoint = load_checkpoint(before)
    trainer.load(checkpoint.tensors, checkpoint.state["trainer"])
    run._save_trainer(trainer)
    run.writer.finish()
    after = target / "checkpoints" / before.name
    for path in before.rglob("*.safetensors"):
        if "bank" not in path.parts:
            assert path.read_bytes() == (after / path.relative_to(before)).read_bytes(), path.name
    states: list[dict[str, Any]] = [json.loads((each / "state.json").read_text()) for each in (before, after)]
    assert "processes" not in states[1]["state"]  # it was written anew
    assert states[0]["state"] == states[1]["state"] | {"processes": 2}


def run(rank: int, size: int, folder: str, cases: Sequence[str], modes: Sequence[str]) -> None:
    """One of `size` spawned processes: the steps `cases`, and a resume in every one of `modes`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    world = World(rank, size, True)
    for case in cases:
        try:
            step_in_processes.check_equal(world, **(step_in_processes.CASES | step_in_processes.MORE)[case])
        except Exception as error:
            raise AssertionError(f"{case}, process {rank}") from error
    for mode in modes:
        check_resume(world, Path(folder, mode), MODES[mode])
    dist.destroy_process_group()
