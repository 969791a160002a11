"""One LOPD step, ours against a plain restatement of the reference's three phases: time, peak memory, gradients.

    python bench/train_step.py                                       a small Qwen3 with a vocabulary of 151,936
    python bench/train_step.py --response 64 128 256 --checkpointing both --json step.json --plot step.png
    python bench/train_step.py --model qwen3-4b --device cuda --dtype bfloat16 --response 2048

Both sides get the same weights and the same rollouts (sampling them is not in the time), run in processes of their
own and step in turns, so that a busy moment of the machine falls on both. Responses are of one length, where the
reference's two ways of weighing tokens agree with the objective, so both sides' gradients must be equal; they are
compared first. Peak memory counts from before a model is loaded: on a CPU the resident set over that of the interpreter
with its libraries, on CUDA what is allocated. docs/train-step.md says what the columns mean and what was measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from step_sides import OURS, SIDES, THEIRS
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config
from transformers.utils import logging

from lopd_fast.demo.smollm import smollm_folder
from lopd_fast.plan.models import named_model

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
SWITCH = {"off": [False], "on": [True], "both": [False, True]}


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    cores = f"{torch.get_num_threads()} CPU threads"
    where = torch.cuda.get_device_name() if options.device.startswith("cuda") else cores
    print(f"{where}, torch {torch.__version__}")
    results = []
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name, "model"), options)
        sizes = itertools.product(SWITCH[options.checkpointing], options.rollouts, options.response)
        for number, (checkpointing, rollouts, response) in enumerate(sizes):
            setting = {key: value for key, value in vars(options).items() if key not in ("json", "plot")}
            setting |= dict(checkpointing=checkpointing, rollouts=rollouts, response=response)
            if not number:
                told = ("checkpointing", "rollouts", "response")
                print(
                    ", ".join(f"{key} {value}" for key, value in setting.items() if key not in told),
                    end="\n\n",
                )
                print(HEADER)
            results.append(measure(Path(name), setting, where))
            print(line(results[-1]), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps({"results": results}, indent=1) + "\n", encoding="utf-8")
    if options.plot:
        plot(results, options.plot)
    wrong = [row for row in results if row["gradient_error"] > TOLERANCE[options.dtype]]
    return 1 if wrong else 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=["small", "qwen3-4b", "qwen3-8b"], default="small")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--layers", type=int, help="blocks, if fewer than the model has")
    parser.add_argument("--rollouts", type=int, nargs="+", default=[2])
    parser.add_argument("--response", type=int, nargs="+", default=[256], help="tokens of a response")
    parser.add_argument("--checkpointing", choices=SWITCH, default="off", help="of gradients, on both sides")
    parser.add_argument("--experiences", type=int, default=3, help="of every rollout")
    parser.add_argument("--trace", type=int, default=64, help="words of an experience")
    parser.add_argument("--queries", type=int, default=32)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument(
        "--micro-batch-tokens", type=int, help="of ours; default: one rollout on a CPU, else 8192"
    )
    parser.add_argument("--repeats", type=int, default=2, help="timed steps, after one that is not")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=TOLERANCE, default="float32")
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--plot", help="write a picture of them to this file (PNG)")
    options = parser.parse_args(arguments)
    if options.micro_batch_tokens is None:  # a CPU gains nothing by more rows at a time
        options.micro_batch_tokens = 1 if options.device == "cpu" else 8192
    return options


def write_model(folder: Path, options: argparse.Namespace) -> None:
    """Random weights at the shapes asked for, with the tokenizer of the demo's model."""
    logging.disable_progress_bar()
    if options.model == "small":
        config: Any = Qwen3Config(
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    else:
        config = named_model(options.model)
    config.vocab_size = options.vocab
    if options.layers:
        config.num_hidden_layers = options.layers
        config.layer_types = config.layer_types[: options.layers]
    torch.manual_seed(0)
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(smollm_folder()).save_pretrained(folder)


def measure(folder: Path, setting: dict[str, Any], where: str) -> dict[str, Any]:
    """Both sides at one size: times in turns, peaks, and the largest relative difference of a gradient."""
    sides = {side: Process(side, folder, setting) for side in SIDES}  # ours leaves its start for the other
    steps: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for _ in range(1 + setting["repeats"]):
        for side, process in sides.items():
            steps[side].append(process.step())
    for process in sides.values():
        process.close()
    ours, theirs = (load_file(folder / f"{side}.safetensors") for side in SIDES)
    assert ours.keys() == theirs.keys(), "the two sides train other tensors"
    error = max(
        float((ours[name] - theirs[name]).norm() / theirs[name].norm().clamp_min(1e-12)) for name in theirs
    )
    row: dict[str, Any] = dict(hardware=where, torch=torch.__version__, setting=setting, gradient_error=error)
    for side, taken in steps.items():
        medians = {key: statistics.median(step[key] for step in taken[1:]) for key in taken[0]}
        row[side] = medians | {"peak_mib": taken[-1]["peak_mib"]}
    row["speed"] = row[THEIRS]["seconds"] / row[OURS]["seconds"]
    row["peak"] = row[OURS]["peak_mib"] / row[THEIRS]["peak_mib"]
    return row


class Process:
    """One side, which takes a step when it is told to."""

    def __init__(self, side: str, folder: Path, setting: dict[str, Any]) -> None:
        command = [sys.executable, str(Path(__file__).with_name("step_sides.py")), side, str(folder)]
        self.side = side
        self.process = subprocess.Popen(
            [*command, json.dumps(setting)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._read()

    def step(self) -> dict[str, float]:
        assert self.process.stdin is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        return self._read()

    def close(self) -> None:
        self.process.communicate()

    def _read(self) -> dict[str, float]:
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        if not said:
            raise SystemExit(f"{self.side} failed with exit status {self.process.wait()}")
        return json.loads(said)


COLUMNS = (
    *("rollouts x tokens", "checkpointing", "s, ours (CPU s)", "s, three phases (CPU s)", "of it disk"),
    *("x the speed", "by CPU time", "peak MiB, ours", "three phases", "share", "gradients differ by"),
)
HEADER = f"| {' | '.join(COLUMNS)} |\n|---|---|{'---:|' * (len(COLUMNS) - 2)}"


def line(row: dict[str, Any]) -> str:
    """A result as a line of the table."""
    setting, ours, theirs = row["setting"], row[OURS], row[THEIRS]
    cells = [f"{setting['rollouts']} x {setting['response']}", "on" if setting["checkpointing"] else "off"]
    cells += [f"{side['seconds']:.2f} ({side['cpu_seconds']:.2f})" for side in (ours, theirs)]
    cells += [f"{theirs['disk']:.2f}", f"{row['speed']:.2f}"]
    cells += [f"{theirs['cpu_seconds'] / ours['cpu_seconds']:.2f}"]
    cells += [f"{ours['peak_mib']:,.0f}", f"{theirs['peak_mib']:,.0f}", f"{row['peak']:.0%}"]
    return f"| {' | '.join(cells)} | {row['gradient_error']:.1e} |"


def plot(results: list[dict[str, Any]], path: str) -> None:
    """Bars of time and peak memory, a pair for every size."""
    from matplotlib.figure import Figure  # the object API: no global state, and PNG is drawn by Agg

    figure = Figure(figsize=(12, 1.8 + 0.55 * len(results)), dpi=120, layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    names = [
        f"{row['setting']['rollouts']} x {row['setting']['response']}"
        + (", checkpointed" if row["setting"]["checkpointing"] else "")
        for row in results
    ]
    for axes, field, title in zip(
        panels, ("seconds", "peak_mib"), ("seconds a step", "peak MiB"), strict=True
    ):
        for side, shift, color in ((OURS, -0.2, "#1f6fb4"), (THEIRS, 0.2, "#a8a8a8")):
            places = [place + shift for place in range(len(results))]
            bars = axes.barh(places, [row[side][field] for row in results], 0.38, color=color, label=side)
            axes.bar_label(bars, fmt="{:,.3g}" if field == "seconds" else "{:,.0f}", padding=3)
        axes.set_title(title)
        axes.set_yticks(range(len(results)), names)
        axes.margins(x=0.12)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].invert_yaxis()
    panels[0].set_ylabel("rollouts x response tokens")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle(f"One LOPD step, {results[0]['setting']['model']} model, {results[0]['hardware']}")
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
