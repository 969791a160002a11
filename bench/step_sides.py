"""One side of `train_step` in a process of its own: it makes a step for every line that it reads, and says how it went.

python bench/step_sides.py SIDE FOLDER SETTING     SETTING is a JSON object; `train_step` starts it
"""

from __future__ import annotations

import gc
import json
import random
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file, save_file
from three_phases import ThreePhases
from torch import Tensor
from transformers.utils import logging

from lopd_fast.backbone import Backbone, load_model, load_tokenizer
from lopd_fast.bank import Experience
from lopd_fast.batch import Rollout
from lopd_fast.build import Parts
from lopd_fast.composer import Composer
from lopd_fast.config import Config, load_config
from lopd_fast.envs.base import Task
from lopd_fast.render import Renderer
from lopd_fast.student import Student
from lopd_fast.trainer import Trainer

OURS, THEIRS = SIDES = ("lopd_fast", "three phases")
BETA = 0.5  # so that the margin has a gradient

# One step; the gradients by name, and the seconds that went into reading and writing models.
Step = Callable[[], tuple[dict[str, Tensor], float]]


def main(side: str, folder: Path, setting: dict[str, Any]) -> None:
    """A step per line of stdin; after each its seconds and the peak memory so far, as a line of JSON."""
    logging.disable_progress_bar()
    config = config_of(folder / "model", setting)
    rollouts = make_rollouts(setting)
    gc.collect()
    before = psutil.Process().memory_info().rss  # the interpreter and the libraries that both sides import
    step = {OURS: ours, THEIRS: three_phases}[side](config, folder, rollouts)
    print(json.dumps({"ready": True}), flush=True)
    for number, _ in enumerate(sys.stdin):
        started, worked = time.perf_counter(), time.process_time()
        gradients, disk = step()
        if config.model.device.startswith("cuda"):
            torch.cuda.synchronize()
        row = dict(seconds=time.perf_counter() - started, cpu_seconds=time.process_time() - worked, disk=disk)
        if number == 0:
            save_file({key: value.cpu() for key, value in gradients.items()}, folder / f"{side}.safetensors")
        print(json.dumps(row | {"peak_mib": peak_bytes(config.model.device, before) / 2**20}), flush=True)


def peak_bytes(device: str, before: int) -> int:
    """The most memory in use so far: allocated on CUDA; on a CPU resident, over `before`."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    try:
        # Not ru_maxrss: that of a process begins at its parent's.
        status = Path("/proc/self/status").read_text()
        peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (1024 if sys.platform == "darwin" else 1)
    return 1024 * peak - before


def config_of(model: Path, setting: dict[str, Any]) -> Config:
    return load_config(
        None,
        [
            f"model.path={model}",
            f"model.dtype={setting['dtype']}",
            f"model.device={setting['device']}",
            f"model.gradient_checkpointing={setting['checkpointing']}",
            f"composer.num_queries={setting['queries']}",
            f"composer.depth={setting['depth']}",
            f"train.micro_batch_tokens={setting['micro_batch_tokens']}",
        ],
    )


def make_rollouts(setting: dict[str, Any]) -> list[Rollout]:
    """Rollouts of random tokens and experiences of random words; all responses have one length."""
    rng = random.Random(0)
    words = [
        f"{a}{b}" for a in ("ta", "ro", "mi", "ne", "lu") for b in ("ka", "so", "pel", "dun", "vi", "gar")
    ]

    def text(count: int) -> str:
        return " ".join(rng.choices(words, k=count))

    count = setting["experiences"]
    experiences = [Experience(f"e{i}", text(20), text(setting["trace"]), 1.0) for i in range(4 * count)]
    rollouts = []
    for number in range(setting["rollouts"]):
        task = Task(f"t{number}", text(20), "g", {})
        ids = [rng.randrange(100, min(40_000, setting["vocab"])) for _ in range(setting["response"])]
        messages = [{"role": "user", "content": task.text}]
        rollout = Rollout(task, messages, ids, [True] * len(ids), float(number % 2))
        rollout.experiences = rng.sample(experiences, count)
        rollouts.append(rollout)
    return rollouts


def ours(config: Config, folder: Path, rollouts: list[Rollout]) -> Step:
    """The trainer's update; leaves theta, phi and phi_0 for the other side."""
    parts = build(config)
    for name, state in (("student", parts.student.state()), ("composer", parts.composer.state())):
        tensors = {key: value.cpu().contiguous() for key, value in state.items()}
        save_file(tensors, folder / f"{name}-start.safetensors")
    trainer = Trainer(parts, [], say=lambda line: None)
    learns = {f"student/{name}": p for name, p in parts.student.trainable()}
    learns |= {f"{part}/{name}": p for part, pairs in parts.composer.trainable().items() for name, p in pairs}
    step_optimizers = trainer._step_optimizers

    def step() -> tuple[dict[str, Tensor], float]:
        gradients: dict[str, Tensor] = {}

        def keep(metrics: Any) -> None:
            gradients.update({name: p.grad.clone() for name, p in learns.items() if p.grad is not None})
            step_optimizers(metrics)

        trainer._step_optimizers = keep
        trainer.beta = BETA
        parts.composer._anchor_cache.clear()  # a step of new tasks: nothing of it was encoded before
        trainer.update(rollouts)
        return gradients, 0.0

    return step


def build(config: Config) -> Parts:
    """The parts that an update needs; phi has moved away from its anchor."""
    torch.manual_seed(0)
    renderer = Renderer(load_tokenizer(config.model))
    backbone = Backbone(load_model(config.model), config.model.gradient_checkpointing)
    student = Student(backbone, config.student)
    composer = Composer(backbone, renderer.tokenizer, config.composer)
    composer.freeze_anchor()
    nothing: Any = None  # no bank, engine or environment: the rollouts are there
    parts = Parts(config, backbone, renderer, student, composer, nothing, nothing, nothing)
    with torch.no_grad():
        for _, tensor in [*student.trainable(), *sum(composer.trainable().values(), [])]:
            tensor.add_(torch.randn_like(tensor), alpha=1e-2)
    return parts


def three_phases(config: Config, folder: Path, rollouts: list[Rollout]) -> Step:
    """The restatement, from the same theta, phi and phi_0."""
    student, composer = (
        load_file(folder / f"{name}-start.safetensors", device=config.model.device)
        for name in ("student", "composer")
    )
    renderer = Renderer(load_tokenizer(config.model))
    reference = ThreePhases(config, renderer, student, composer, BETA, folder)

    def step() -> tuple[dict[str, Tensor], float]:
        before = reference.disk_seconds
        gradients = reference.step(rollouts)
        return gradients, reference.disk_seconds - before

    return step


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
