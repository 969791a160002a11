"""The composer's QFormer against `qformer_ref`, forward and backward: time, peak memory and error.

    python bench/composer.py                          memory lengths x batch sizes, and two ragged batches
    python bench/composer.py --json rows.jsonl --plot composer.png

A row is one batch of memories. Both sides run on the very same tensors, first checked against `qformer_ref` in fp64,
then timed in turns. Times are 20/50/80 % quantiles of forward + backward. The speed-up is the median of the ratios of
each turn; next to it stands that of the FLOP of the matrix products alone. Peak memory is what the step holds on top
of parameters, inputs and the gradients that it returns. A side whose error is out of bounds gets no speed-up and the
exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import Step, interleaved_ms, peak_extra_bytes, quantiles, relative_error
from torch import Tensor

from lopd_fast.qformer import QFormer, qformer_ref

SIDES = ("ours", "restatement")
RAGGED = [[700, 1, 1500, 333], [0, 1, 7, 65, 1033]]
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


def main() -> int:
    options = parse()
    device = torch.device(options.device)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[options.dtype]
    torch.manual_seed(0)
    sizes = dict(num_queries=options.queries, depth=options.depth, heads=options.heads)
    module = QFormer(options.dim, **sizes).to(device, dtype)
    batches = [[length] * batch for batch in options.batches for length in options.lengths]
    batches += [lengths for lengths in options.ragged or RAGGED if lengths]

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
        "--ragged", type=int, nargs="*", action="append", help="a batch of mixed lengths; may be repeated"
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


def large_row(
    device: str | torch.device = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    *,
    dim: int = 4096,
    heads: int = 32,
    memories: int = 32 * 3,
    between: tuple[int, int] = (1024, 8192),
    repeats: int = 5,
) -> dict[str, Any]:
    """A row at the size of an 8B backbone's step: 32 tasks with 3 memories of 1k to 8k tokens each.

    Both sides are checked on the two shortest memories, in fp64. The restatement goes backward sample by sample: the
    graphs of all of them at once would hold some 140 GB in bf16.
    """
    torch.manual_seed(0)
    module = QFormer(dim, heads=heads).to(device, dtype)
    lengths = torch.randint(between[0], between[1] + 1, (memories,)).tolist()
    return measure(module, lengths, repeats, checked=sorted(lengths)[:2], apart=True)


def measure(
    module: QFormer, lengths: list[int], repeats: int, checked: list[int] | None = None, apart: bool = False
) -> dict[str, Any]:
    """One row: checks both sides, on these lengths or those to be `checked`, then times them in turns.

    apart: the restatement takes one sample after the other, backward included.
    """
    inputs = batch_of(module, checked or lengths)
    memory, device = inputs[0], inputs[0].device
    exact = restatement(module, *inputs, torch.float64)()
    errors = {}
    for side, step in sides(module, *inputs, apart=apart).items():
        result = step()
        error = {name: relative_error(result[name], right) for name, right in exact.items()}
        errors[side] = dict(output=error.pop("output"), gradient=max(error.values()))
    del exact, result, step
    correct = all(error < TOLERANCE[memory.dtype] for error in errors["ours"].values())

    steps = sides(module, *(batch_of(module, lengths) if checked else inputs), apart=apart)
    peaks = {side: peak_extra_bytes(step, device) for side, step in steps.items()}
    times, failed = interleaved_ms(steps, repeats, device)
    for failure in failed.values():
        raise failure
    ratios = [theirs / ours for ours, theirs in zip(times["ours"], times["restatement"], strict=True)]
    return dict(
        lengths=lengths,
        tokens=sum(lengths),
        ms={side: [round(ms, 3) for ms in quantiles(taken)] for side, taken in times.items()},
        peak_mib={side: round(peak / 2**20, 3) for side, peak in peaks.items()},
        error=errors,
        correct=correct,
        speedup=quantiles(ratios)[1] if correct else None,
        memory_ratio=peaks["ours"] / max(1, peaks["restatement"]),
        products=products(module, lengths),
    )


def products(module: QFormer, lengths: list[int]) -> dict[str, float]:
    """FLOP of the matrix products of a step, counted: what a speed-up of equally quick products would be.

    The restatement projects the memory in every layer, ours once; it also projects the first layer's queries, which
    all samples have in common, once for each sample.
    """
    dim, inner, queries = module.dim, module.heads * module.dim_head, module.num_queries
    rows = len(lengths) * queries
    feed_forward = sum(weight.numel() for name, weight in module.named_parameters() if ".1.weight" in name)
    layer = 4 * dim * inner + 2 * feed_forward // (1 if module.share_layers else module.depth)
    query_side = 6 * rows * (module.depth * layer + dim * dim)
    read, project = 6 * sum(lengths) * dim * dim, 6 * sum(lengths) * dim * 2 * inner
    attend = 12 * module.depth * sum(lengths) * queries * inner
    times = 1 if module.share_layers else module.depth
    return dict(
        ours=query_side - 6 * (rows - queries) * 3 * dim * inner + read + times * project + attend,
        restatement=query_side + read + module.depth * project + attend,
    )


def batch_of(module: QFormer, lengths: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """A memory (total_tokens, dim), cu_seqlens (B + 1,), and the output's gradient (B, num_queries, dim)."""
    options: Any = dict(device=module.latents.device, dtype=module.latents.dtype)
    memory = torch.randn(sum(lengths), module.dim, **options)
    upstream = torch.randn(len(lengths), module.num_queries, module.dim, **options)
    return memory, torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), upstream


def sides(
    module: QFormer, memory: Tensor, cu_seqlens: Tensor, upstream: Tensor, *, apart: bool
) -> dict[str, Step]:
    leaf = memory.clone().requires_grad_()
    leaves = dict(module.named_parameters()) | {"memory": leaf}

    def ours() -> dict[str, Tensor]:
        return backpropagated(leaves, lambda: module(leaf, cu_seqlens), upstream)

    return {
        "ours": ours,
        "restatement": restatement(module, memory, cu_seqlens, upstream, memory.dtype, apart),
    }


def restatement(
    module: QFormer,
    memory: Tensor,
    cu_seqlens: Tensor,
    upstream: Tensor,
    dtype: torch.dtype,
    apart: bool = False,
) -> Step:
    state = {name: p.detach().to(dtype, copy=True).requires_grad_() for name, p in module.named_parameters()}
    leaf = memory.to(dtype, copy=True).requires_grad_()
    sizes = dict(heads=module.heads, depth=module.depth)

    def together() -> dict[str, Tensor]:
        leaves = state | {"memory": leaf}
        return backpropagated(leaves, lambda: qformer_ref(state, leaf, cu_seqlens, **sizes), upstream)

    def one_by_one() -> dict[str, Tensor]:
        total: dict[str, Tensor] = {}
        samples: dict[str, list[Tensor]] = {"memory": [], "output": []}
        for rows, one in zip(leaf.detach().split(cu_seqlens.diff().tolist()), upstream, strict=True):
            rows, ends = rows.requires_grad_(), torch.tensor([0, len(rows)])
            leaves = state | {"memory": rows}
            found = backpropagated(
                leaves, lambda rows=rows, ends=ends: qformer_ref(state, rows, ends, **sizes), one[None]
            )
            for name, parts in samples.items():
                parts.append(found.pop(name))
            total = {name: total[name].add_(x) if name in total else x for name, x in found.items()}
        return total | {name: torch.cat(parts) for name, parts in samples.items()}

    return one_by_one if apart else together


def backpropagated(
    leaves: dict[str, Tensor], forward: Callable[[], Tensor], upstream: Tensor
) -> dict[str, Tensor]:
    output = forward()
    grads = torch.autograd.grad(output, list(leaves.values()), upstream.to(output.dtype))
    return dict(zip(leaves, grads, strict=True)) | {"output": output.detach()}


def print_row(row: dict[str, Any]) -> None:
    lengths = row["lengths"]
    label = f"{len(lengths)} x {lengths[0]}" if len(set(lengths)) == 1 else "+".join(map(str, lengths))
    for side in SIDES:
        times = " / ".join(f"{ms:.1f}" for ms in row["ms"][side])
        error = row["error"][side]
        gain = ""
        if side == "ours":
            speed = f"{row['speedup']:.2f}" if row["correct"] else "WRONG"
            counted = row["products"]["restatement"] / row["products"]["ours"]
            gain = f"speed {speed} (products {counted:.2f}), memory {row['memory_ratio']:.2f}"
        print(
            f"{label:>22} {side:>12} {times:>24} {row['peak_mib'][side]:>9.2f} "
            f"{error['output']:>13.1e} {error['gradient']:>9.1e}  {gain}",
            flush=True,
        )


def plot(rows: list[dict[str, Any]], path: str) -> None:
    """Time and peak memory against the batch's memory tokens, a line a batch size, on logarithmic axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import NullFormatter

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), constrained_layout=True)
    panels = [("forward + backward, ms (median)", lambda row, side: row["ms"][side][1])]
    panels += [("peak memory, MiB", lambda row, side: row["peak_mib"][side])]
    for axis, (title, value) in zip(axes, panels, strict=True):
        for side, colour in zip(SIDES, ("C0", "C1"), strict=True):
            for (size, even), mark in zip(
                sorted({batch_kind(row) for row in rows}), "osD^v<>" * 9, strict=False
            ):
                drawn = sorted((r["tokens"], value(r, side)) for r in rows if batch_kind(r) == (size, even))
                label = f"{side}, {size} memor{'y' if size == 1 else 'ies'}{'' if even else ', ragged'}"
                axis.loglog(*zip(*drawn, strict=True), mark + "-", color=colour, label=label)
        tokens = sorted({row["tokens"] for row in rows})
        ticks = [x for i, x in enumerate(tokens) if i == 0 or x > 1.4 * tokens[i - 1]]
        axis.set_xticks(ticks, [str(x) for x in ticks])
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.set(xlabel="memory tokens in the batch", title=title)
        axis.grid(alpha=0.3, which="both")
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=150)


def batch_kind(row: dict[str, Any]) -> tuple[int, bool]:
    """Memories of a batch, and whether they are of one length."""
    return len(row["lengths"]), len(set(row["lengths"])) == 1


if __name__ == "__main__":
    sys.exit(main())
