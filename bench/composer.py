"""The composer's QFormer against `qformer_ref`, forward and backward: time, peak memory and error.

    python bench/composer.py                          memory lengths x batch sizes, and one ragged batch
    python bench/composer.py --json rows.jsonl --plot composer.png

A row is one batch of memories. Both sides run on the very same tensors, first checked against `qformer_ref` in fp64,
then timed in turns. Times are 20/50/80 % quantiles of forward + backward; peak memory is what the run allocates on
top of parameters and inputs. A side whose error is out of bounds gets no speed-up and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lopd_fast.qformer import QFormer, qformer_ref

SIDES = ("ours", "restatement")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
Step = Callable[[], dict[str, Tensor]]  # runs forward and backward; output and gradients by name


def main() -> int:
    options = parse()
    device = torch.device(options.device)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[options.dtype]
    torch.manual_seed(0)
    sizes = dict(num_queries=options.queries, depth=options.depth, heads=options.heads)
    module = QFormer(options.dim, **sizes).to(device, dtype)
    batches = [[length] * batch for batch in options.batches for length in options.lengths]
    batches += [options.ragged] if options.ragged else []

    setting = dict(
        device=torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.machine()} CPU",
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        dtype=options.dtype,
        **(dict(dim=options.dim) | sizes),
    )
    print(", ".join(f"{name} {value}" for name, value in setting.items()))
    print(
        f"{'memories':>22} {'side':>12} {'ms 20/50/80 %':>24} {'peak MiB':>9} "
        f"{'output error':>13} {'gradient':>9}  ours : restatement"
    )
    rows = []
    for lengths in batches:
        row = setting | measure(module, lengths, options.repeats)
        rows.append(row)
        print_row(row)
        if options.json:
            with Path(options.json).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    if options.plot:
        plot(rows, options.plot)
    return 0 if all(row["correct"] for row in rows) else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[256, 1024, 2048], help="memory tokens of a sample"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4], help="samples per batch")
    parser.add_argument(
        "--ragged", type=int, nargs="*", default=[700, 1, 1500, 333], help="one batch of mixed lengths"
    )
    parser.add_argument("--dim", type=int, default=576)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--queries", type=int, default=32)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--json", help="append one JSON line per row to this file")
    parser.add_argument(
        "--plot", help="write a picture of time and peak memory to this file (needs matplotlib)"
    )
    return parser.parse_args()


def measure(module: QFormer, lengths: list[int], repeats: int) -> dict[str, Any]:
    """One row: checks both sides on these lengths, then times them in turns."""
    parameter = module.latents
    memory = torch.randn(sum(lengths), module.dim, device=parameter.device, dtype=parameter.dtype)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    upstream = torch.randn(len(lengths), module.num_queries, module.dim, device=memory.device)
    steps = sides(module, memory, cu_seqlens, upstream)

    exact = restatement(module, memory, cu_seqlens, upstream, torch.float64)()
    errors = {}
    for side, step in steps.items():
        result = step()
        error = {name: relative_error(result[name], right) for name, right in exact.items()}
        errors[side] = dict(output=error.pop("output"), gradient=max(error.values()))
    del exact
    peaks = {side: peak_bytes(step, memory.device) for side, step in steps.items()}
    seconds: dict[str, list[float]] = {side: [] for side in steps}
    for _ in range(repeats):
        for side, step in steps.items():
            seconds[side].append(timed(step, memory.device))
    correct = all(error < TOLERANCE[memory.dtype] for error in errors["ours"].values())
    quantiles = {
        side: torch.tensor(taken).quantile(torch.tensor([0.2, 0.5, 0.8])).tolist()
        for side, taken in seconds.items()
    }
    return dict(
        lengths=lengths,
        tokens=sum(lengths),
        ms={side: [round(1e3 * q, 3) for q in values] for side, values in quantiles.items()},
        peak_mib={side: round(peak / 2**20, 3) for side, peak in peaks.items()},
        error=errors,
        correct=correct,
        speedup=quantiles["restatement"][1] / quantiles["ours"][1] if correct else None,
        memory_ratio=peaks["ours"] / peaks["restatement"],
    )


def sides(module: QFormer, memory: Tensor, cu_seqlens: Tensor, upstream: Tensor) -> dict[str, Step]:
    leaf = memory.clone().requires_grad_()
    parameters = dict(module.named_parameters())

    def ours() -> dict[str, Tensor]:
        return backpropagated(parameters | {"memory": leaf}, lambda: module(leaf, cu_seqlens), upstream)

    return {"ours": ours, "restatement": restatement(module, memory, cu_seqlens, upstream, memory.dtype)}


def restatement(
    module: QFormer, memory: Tensor, cu_seqlens: Tensor, upstream: Tensor, dtype: torch.dtype
) -> Step:
    state = {name: p.detach().to(dtype, copy=True).requires_grad_() for name, p in module.named_parameters()}
    leaf = memory.to(dtype, copy=True).requires_grad_()

    def forward() -> Tensor:
        return qformer_ref(state, leaf, cu_seqlens, heads=module.heads, depth=module.depth)

    return lambda: backpropagated(state | {"memory": leaf}, forward, upstream)


def backpropagated(
    leaves: dict[str, Tensor], forward: Callable[[], Tensor], upstream: Tensor
) -> dict[str, Tensor]:
    output = forward()
    grads = torch.autograd.grad(output, list(leaves.values()), upstream.to(output.dtype))
    return dict(zip(leaves, grads, strict=True)) | {"output": output.detach()}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def timed(step: Step, device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(step: Step, device: torch.device) -> int:
    """Most bytes held at once during a step, over those held before it; on the CPU by replaying the allocator's log."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step()
    events: Any = profile.profiler.kineto_results.events()  # type: ignore
    log = sorted(
        (event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns()
    )
    return int(torch.tensor([event.nbytes() for event in log]).cumsum(0).max())


def print_row(row: dict[str, Any]) -> None:
    lengths = row["lengths"]
    label = f"{len(lengths)} x {lengths[0]}" if len(set(lengths)) == 1 else "+".join(map(str, lengths))
    for side in SIDES:
        times = " / ".join(f"{ms:.1f}" for ms in row["ms"][side])
        error = row["error"][side]
        gain = ""
        if side == "ours":
            speed = f"{row['speedup']:.2f}" if row["correct"] else "WRONG"
            gain = f"speed {speed}, memory {row['memory_ratio']:.2f}"
        print(
            f"{label:>22} {side:>12} {times:>24} {row['peak_mib'][side]:>9.2f} "
            f"{error['output']:>13.1e} {error['gradient']:>9.1e}  {gain}",
            flush=True,
        )


def plot(rows: list[dict[str, Any]], path: str) -> None:
    """Time and peak memory against the batch's memory tokens, both sides, on logarithmic axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = sorted(rows, key=lambda row: row["tokens"])
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    panels = [("forward + backward, ms (median)", lambda row, side: row["ms"][side][1])]
    panels += [("peak memory, MiB", lambda row, side: row["peak_mib"][side])]
    for axis, (title, value) in zip(axes, panels, strict=True):
        for side in SIDES:
            axis.loglog([row["tokens"] for row in rows], [value(row, side) for row in rows], "o-", label=side)
        axis.set(xlabel="memory tokens in the batch", title=title)
        axis.grid(alpha=0.3, which="both")
        axis.legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
