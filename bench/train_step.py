"""One LOPD step, ours against a plain restatement of the reference's three phases: time, peak memory, gradients.

    python bench/train_step.py                                   a small Qwen3 with a vocabulary of 151,936, on the CPU
    python bench/train_step.py --model qwen3-4b --device cuda    random weights at the shapes of a real model
    python bench/train_step.py --json step.json

Both sides get the same weights and the same rollouts (sampling them is not in the time) and run in a process of their
own. Responses are of one length, where the reference's two ways of weighing tokens agree with the objective, so both
sides' gradients must be equal; they are compared first. Peak memory counts from before the model is loaded: resident
memory on a CPU, allocated memory on CUDA.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config
from transformers.utils import logging

from lopd_fast.backbone import Backbone, load_model, load_tokenizer
from lopd_fast.bank import Experience
from lopd_fast.batch import Rollout
from lopd_fast.build import Parts
from lopd_fast.composer import Composer
from lopd_fast.config import Config, load_config
from lopd_fast.demo.smollm import smollm_folder
from lopd_fast.envs.base import Task
from lopd_fast.render import Renderer
from lopd_fast.student import Student
from lopd_fast.trainer import Trainer

MODELS: dict[str, dict[str, Any]] = {  # Qwen3's shapes
    "small": dict(
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
    ),
    "qwen3-4b": dict(
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
    "qwen3-8b": dict(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
}
SIDES = ("lopd_fast", "three phases")
BETA = 0.5  # so that the margin has a gradient
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}


def main() -> int:
    options = parse()
    if options.side is not None:
        return run_side(options.side, Path(options.folder), options)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model", options)
        rows = []
        for side in SIDES:
            command = [sys.executable, __file__, *sys.argv[1:], "--side", side, "--folder", name]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ})
            if done.returncode:
                print(f"{side} failed with exit status {done.returncode}", file=sys.stderr)
                return 1
            rows.append(json.loads(done.stdout.splitlines()[-1]))
        ours, theirs = (load_file(folder / f"{side}.safetensors") for side in SIDES)
    assert ours.keys() == theirs.keys(), "the two sides train other tensors"
    error = max(
        float((ours[name] - theirs[name]).norm() / theirs[name].norm().clamp_min(1e-12)) for name in theirs
    )
    setting = {name: value for name, value in vars(options).items() if name not in ("side", "folder", "json")}
    print(", ".join(f"{name} {value}" for name, value in setting.items()))
    print(f"{'':>14} {'seconds a step':>15} {'peak MiB':>10}")
    for row in rows:
        print(f"{row['side']:>14} {row['seconds']:>15.2f} {row['peak_mib']:>10.0f}")
    fast, slow = rows
    print(
        f"{slow['seconds'] / fast['seconds']:.2f}x the speed, {fast['peak_mib'] / slow['peak_mib']:.0%} of the peak; "
        f"largest relative difference of a gradient {error:.1e}"
    )
    if options.json:
        result = {"setting": setting, "sides": rows, "gradient_error": error}
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if error <= TOLERANCE[options.dtype] else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(MODELS), default="small")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument("--experiences", type=int, default=3, help="of every rollout")
    parser.add_argument("--response", type=int, default=256, help="tokens of a response")
    parser.add_argument("--trace", type=int, default=256, help="words of an experience")
    parser.add_argument("--queries", type=int, default=32)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=list(TOLERANCE), default="float32")
    parser.add_argument("--json", help="write the result to this file as well")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


def write_model(folder: Path, options: argparse.Namespace) -> None:
    """Random weights at the shapes asked for, with the tokenizer of the demo's model."""
    logging.disable_progress_bar()
    torch.manual_seed(0)
    tied = options.model != "qwen3-8b"
    config = Qwen3Config(vocab_size=options.vocab, tie_word_embeddings=tied, **MODELS[options.model])
    model: Any = AutoModelForCausalLM.from_config(config)
    model.to(getattr(torch, options.dtype)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(smollm_folder()).save_pretrained(folder)


def run_side(side: str, folder: Path, options: argparse.Namespace) -> int:
    """In a process of its own: gradients of the first step to a file, time and peak memory to stdout."""
    logging.disable_progress_bar()
    config = load_config(
        None,
        [
            f"model.path={folder / 'model'}",
            f"model.dtype={options.dtype}",
            f"model.device={options.device}",
            f"composer.num_queries={options.queries}",
            f"composer.depth={options.depth}",
        ],
    )
    rollouts = make_rollouts(options)
    before = psutil.Process().memory_info().rss
    if side == SIDES[0]:
        step = ours(config, folder, rollouts)
    else:
        step = three_phases(config, folder, rollouts)
    seconds = []
    for _ in range(options.repeats):
        started = time.perf_counter()
        gradients = step()
        if options.device.startswith("cuda"):
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        if len(seconds) == 1:
            save_file({key: value.cpu() for key, value in gradients.items()}, folder / f"{side}.safetensors")
    if options.device.startswith("cuda"):
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    print(json.dumps({"side": side, "seconds": statistics.median(seconds), "peak_mib": peak / 2**20}))
    return 0


def make_rollouts(options: argparse.Namespace) -> list[Rollout]:
    """Rollouts of random tokens and experiences of random words."""
    rng = random.Random(0)
    words = [
        f"{a}{b}" for a in ("ta", "ro", "mi", "ne", "lu") for b in ("ka", "so", "pel", "dun", "vi", "gar")
    ]

    def text(count: int) -> str:
        return " ".join(rng.choices(words, k=count))

    experiences = [
        Experience(f"e{i}", text(20), text(options.trace), 1.0) for i in range(4 * options.experiences)
    ]
    rollouts = []
    for number in range(options.rollouts):
        task = Task(f"t{number}", text(20), "g", {})
        ids = [rng.randrange(100, 40_000) for _ in range(options.response)]
        rollout = Rollout(
            task, [{"role": "user", "content": task.text}], ids, [True] * len(ids), float(number % 2)
        )
        rollout.experiences = rng.sample(experiences, options.experiences)
        rollouts.append(rollout)
    return rollouts


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


def ours(config: Config, folder: Path, rollouts: list[Rollout]) -> Any:
    """The trainer's update; leaves theta, phi and phi_0 for the other side."""
    parts = build(config)
    for name, state in (("student", parts.student.state()), ("composer", parts.composer.state())):
        save_file(
            {key: value.cpu().contiguous() for key, value in state.items()},
            folder / f"{name}-start.safetensors",
        )
    trainer = Trainer(parts, [], say=lambda line: None)
    learns = {f"student/{name}": p for name, p in parts.student.trainable()}
    learns |= {f"{part}/{name}": p for part, pairs in parts.composer.trainable().items() for name, p in pairs}
    gradients: dict[str, torch.Tensor] = {}

    def keep(*_: Any) -> None:
        gradients.update({name: p.grad.clone() for name, p in learns.items() if p.grad is not None})

    step_optimizers = trainer._step_optimizers

    def step() -> dict[str, torch.Tensor]:
        trainer.beta = BETA
        trainer._step_optimizers = lambda metrics: (keep(), step_optimizers(metrics))[1]
        trainer.update(rollouts)
        return gradients

    return step


def three_phases(config: Config, folder: Path, rollouts: list[Rollout]) -> Any:
    """The restatement, from the same theta, phi and phi_0."""
    from three_phases import ThreePhases

    student, composer = (load_file(folder / f"{name}-start.safetensors") for name in ("student", "composer"))
    renderer = Renderer(load_tokenizer(config.model))
    reference = ThreePhases(config, renderer, student, composer, BETA, folder)
    return lambda: reference.step(rollouts)


if __name__ == "__main__":
    sys.exit(main())
