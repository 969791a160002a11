"""From hidden states to the distillation loss and its gradients: ours, the dense floor, and what others offer.

    python bench/kl_throughput.py                                       a first look, at sizes for the machine
    python bench/kl_throughput.py --preset qwen3-8b --rows 2048 8192    a sweep over rows at the sizes of a model
    python bench/kl_throughput.py --rows 512 --hidden 512 --vocab 151936 --dtype fp32 --json f.json --plot f.png

A step goes from the hidden states of N rows, student's and teacher's, over one frozen head to the reverse KL and the
gradients of the hidden states. All providers work on the same tensors; each is first held against fp64 on them, then
all are timed in turns. docs/benchmarks.md says what the columns mean. A provider that is not installed, fails or would
not fit is a row that says so. The exit status is 1 if an exact answer of ours is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from kl_peers import Unavailable
from kl_plot import plot
from kl_problem import CHECKED_ROWS, Exact, Problem, exact_answers, make_problem
from kl_providers import PROVIDERS, Provider
from measure import Step, free_bytes, interleaved_ms, peak_extra_bytes, quantiles, relative_error

from lopd_fast.scratch import release_scratch

PRESETS = {  # vocabulary, hidden size
    "qwen3-8b": (151_936, 4096),
    "qwen3-4b": (151_936, 2560),
    "olmo3-7b": (100_278, 4096),
    "smollm2": (49_152, 576),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
K = 20
FLOOR, WRONG = PROVIDERS[0].name, "WRONG"
NUMBERS = ("ms_median", "ratio_to_floor", "tokens_per_s", "peak_extra_mib", "max_rel_err", "ms_20", "ms_80")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    device = torch.device(options.device)
    where = (
        torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    )
    print(f"{where}, {platform.machine()}, torch {torch.__version__}")
    results: list[dict[str, Any]] = []
    for rows in options.rows:
        size = dict(rows=rows, vocab=options.vocab, hidden=options.hidden, dtype=options.dtype)
        size |= dict(device=device.type, hardware=where)
        needed = rough_bytes(rows, options.vocab, options.hidden)
        if needed > free_bytes(device):
            print(
                f"\n{label(size)}: not run, the tensors alone need {gib(needed)}, {gib(free_bytes(device))} are free"
            )
            continue
        problem = make_problem(rows, options.vocab, options.hidden, DTYPES[options.dtype], device, K)
        exact = exact_answers(problem)
        print(f"\n{label(size)}\n{exact.inputs}\n", flush=True)
        measured = compare(problem, exact, size, options.repeats, PROVIDERS)
        print(table(measured), flush=True)
        results += measured
    if options.json:
        Path(options.json).write_text(json.dumps({"results": results}, indent=1) + "\n", encoding="utf-8")
    if options.plot:
        plot(results, options.plot)
    if device.type != "cuda":
        more = ", ".join(provider.name for provider in PROVIDERS if provider.needs_cuda)
        print(f"\nNo GPU was used. A run on one adds {more} and the Triton kernels of lopd_fast and TRL.")
    wrong = [row["name"] for row in results if row["note"] == WRONG]
    return 1 if wrong else 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.is_available()
    parser.add_argument("--preset", choices=PRESETS, help="vocabulary and hidden size of a model")
    parser.add_argument("--rows", type=positive, nargs="+", help="supervised tokens; several make a sweep")
    parser.add_argument("--vocab", type=positive)
    parser.add_argument("--hidden", type=positive)
    parser.add_argument("--dtype", choices=DTYPES, help="of hidden states and head")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if cuda else "cpu")
    parser.add_argument("--repeats", type=positive, help="timed steps of each provider")
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--plot", help="write a picture of them to this file (PNG)")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not cuda:
        parser.error("--device cuda: this torch sees no GPU")
    gpu = options.device == "cuda"
    vocab, hidden = PRESETS[options.preset or ("qwen3-8b" if gpu else "smollm2")]
    options.vocab, options.hidden = options.vocab or vocab, options.hidden or hidden
    options.rows = options.rows or ([2048, 8192] if gpu else [128, 512])
    options.dtype = options.dtype or ("bf16" if gpu else "fp32")
    options.repeats = options.repeats or (20 if gpu else 5)
    if options.hidden < 4:
        parser.error(f"--hidden {options.hidden}: inputs like a model's need at least 4")
    if options.vocab <= K:
        parser.error(f"--vocab {options.vocab}: the divergence takes the top {K}, so it needs more")
    return options


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def rough_bytes(rows: int, vocab: int, hidden: int) -> float:
    """Of the inputs while they are made, and of the fp64 answers."""
    return 6 * (vocab + 4 * rows) * hidden + 6 * 8 * min(rows, CHECKED_ROWS) * vocab


def compare(
    problem: Problem, exact: Exact, size: dict[str, Any], repeats: int, providers: Iterable[Provider]
) -> list[dict[str, Any]]:
    """One row per provider: checked, weighed, then timed in turns with all others."""
    device = problem.weight.device
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Step] = {}
    for provider in providers:
        if provider.needs_cuda and device.type != "cuda":
            continue
        row = rows[provider.name] = dict(name=provider.name) | size | dict.fromkeys(NUMBERS)
        row |= dict(computes=provider.computes, note="")
        try:
            steps[provider.name] = weigh(provider, problem, exact, row)
        except Unavailable as reason:
            row["note"] = str(reason)
        except Exception as error:  # a peer may fail in its own way; the others go on
            row["note"] = failure(error)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    times, errors = interleaved_ms(steps, repeats, device)
    for name, error in errors.items():
        rows[name]["note"] = failure(error)
    floor = quantiles(times[FLOOR])[1] if times.get(FLOOR) else None
    for name, taken in times.items():
        low, median, high = quantiles(taken)
        rows[name] |= dict(ms_median=median, ms_20=low, ms_80=high, tokens_per_s=1e3 * problem.rows / median)
        rows[name]["ratio_to_floor"] = None if floor is None else median / floor
    return list(rows.values())


def weigh(provider: Provider, problem: Problem, exact: Exact, row: dict[str, Any]) -> Step:
    """The provider's step, after its error and its peak memory went into the row."""
    device = problem.weight.device
    needed, free = provider.bytes_needed(problem), free_bytes(device)
    if needed > 0.9 * free:
        raise Unavailable(f"not run: needs about {gib(needed)}, {gib(free)} are free")
    step = provider.prepare(problem)
    result = step()
    if provider.answer is not None:
        errors = errors_of(result, exact, provider.answer).values()
        finite = all(math.isfinite(error) for error in errors)
        row["max_rel_err"] = max(errors) if finite else None
        if not finite or max(errors) > provider.tolerance.get(problem.weight.dtype, math.inf):
            row["note"] = WRONG if provider.tolerance else "gives NaN or infinity"
    del result
    release_scratch()  # what a call before kept is this one's too
    row["peak_extra_mib"] = peak_extra_bytes(step, device) / 2**20
    return step


def errors_of(result: dict[str, Any], exact: Exact, answer: str) -> dict[str, float]:
    """Relative error of the loss, where fp64 has it, and of each gradient that the provider gives."""
    errors = {}
    for name, right in exact.answers[answer].items():
        if name in result:
            actual = result[name] if name == "loss" else result[name][exact.rows]
            errors[name] = relative_error(actual, right)
    return errors


def failure(error: Exception) -> str:
    return f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"


def gib(count: float) -> str:
    return f"{count / 2**30:,.1f} GiB"


def label(size: dict[str, Any]) -> str:
    rows, vocab, hidden = (f"{size[name]:,}" for name in ("rows", "vocab", "hidden"))
    return f"{rows} rows, vocabulary {vocab}, hidden {hidden}, {size['dtype']}, {size['device']}"


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as an aligned Markdown table."""

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    lines = [
        ("", "ms, median (20-80 %)", "x floor", "tokens/s", "peak extra MiB", "max rel. error", "computes")
    ]
    for row in rows:
        time = "-"
        if row["ms_median"] is not None:
            digits = ",.0f" if row["ms_median"] >= 100 else ".2f"
            time = f"{row['ms_median']:{digits}} ({row['ms_20']:{digits}}-{row['ms_80']:{digits}})"
        lines.append(
            (
                row["name"],
                time,
                number(row["ratio_to_floor"], ".2f"),
                number(row["tokens_per_s"], ",.0f"),
                number(row["peak_extra_mib"], ",.0f"),
                number(row["max_rel_err"], ".1e"),
                row["note"] or row["computes"],
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    right = range(1, 6)
    text = []
    for line in lines:
        cells = [
            cell.rjust(w) if i in right else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ]
        text.append("| " + " | ".join(cells) + " |")
    rule = ["-" * (w - 1) + ":" if i in right else "-" * w for i, w in enumerate(widths)]
    return "\n".join([text[0], "| " + " | ".join(rule) + " |", *text[1:]])


if __name__ == "__main__":
    sys.exit(main())
