"""Parts of `gpu_check.py`: time, rates and memory against what this device reaches in a copy and in a dense product."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import kl_throughput
import torch
from gpu_bench import Bench
from kl_problem import exact_answers
from measure import peak_extra_bytes
from torch import Tensor

from lopd_fast import fused_linear_topk_tail_kl, topk_tail_kl
from lopd_fast.kernels import block_stats, logits_grad
from lopd_fast.kernels._common import Logits

EXACT, FILTERED, PEAK_MIB, FASTER = 1.15, 0.75, 1024, 2  # of the floor, of the floor, at most, than peers
PEERS = ("TRL chunked", "Liger Triton")


def roofs(bench: Bench) -> None:
    """What this device reaches in a copy and in bf16 products of the head's shapes."""
    bench.note("copy", {"TB/s": 1e-12 * bench.copy_rate})
    weight = bench.randn(bench.vocab, bench.hidden).bfloat16()
    for rows in (4,) if bench.small else (512, 1024, 8192):
        hidden = bench.randn(rows, bench.hidden).bfloat16()
        logits = hidden @ weight.T
        taken = bench.milliseconds(up=lambda: hidden @ weight.T, down=lambda: logits @ weight)  # noqa: B023
        rates = {f"TFLOP/s {name}": 2e-9 * rows * weight.numel() / ms for name, ms in taken.items()}
        bench.note(f"bf16 GEMM of {rows} rows to the vocabulary (up) and back (down)", rates)


def logits(bench: Bench, rows: int) -> None:
    """Forward and backward from bf16 logits: bytes that must move (each read twice, written once) over the copy's."""
    shape = (rows, bench.vocab)
    leaves = [
        bench.randn(*shape, dtype=torch.bfloat16, seed=seed).mul_(3).requires_grad_() for seed in (1, 2)
    ]

    def step() -> dict[str, Tensor]:
        loss = topk_tail_kl(*leaves, k=bench.k, backend="triton").loss
        return dict(zip(("student", "teacher"), torch.autograd.grad(loss, leaves), strict=True))

    taken = bench.milliseconds(step=step)["step"]
    rate = 6e3 * leaves[0].nbytes / taken
    values = {"ms": taken, "TB/s": 1e-12 * rate}
    bench.at_least(f"logits path, {rows} rows", 0.8, "of copy", rate / bench.copy_rate, values)
    bench.note(
        f"logits path, {rows} rows, extra peak", dict(MiB=peak_extra_bytes(step, bench.device) / 2**20)
    )


def fused(bench: Bench, rows: int) -> None:
    """`kl_throughput` at these rows: ours, exact and filtered, against the dense products and the peers."""
    problem = bench.problem(rows)
    size = dict(rows=rows, vocab=bench.vocab, hidden=bench.hidden, dtype="bf16", device=bench.device.type)
    size["hardware"] = torch.cuda.get_device_name() if bench.device.type == "cuda" else "CPU"
    providers = kl_throughput.PROVIDERS
    if bench.small:  # importing the peers takes longest
        providers = [p for p in providers if p.name.startswith("lopd_fast") or "floor" in p.name]
    exact = exact_answers(problem)
    print(exact.inputs, flush=True)
    measured = kl_throughput.compare(problem, exact, size, 1 if bench.small else 5, providers)
    print(kl_throughput.table(measured), flush=True)
    bench.attach(measured)
    ours = next(row["ms_median"] for row in measured if row["name"] == "lopd_fast fused")
    for row in measured:
        fused_row(bench, f"{row['name']}, {rows} rows", row, ours)


def fused_row(bench: Bench, what: str, row: dict[str, Any], ours: float | None) -> None:
    """A provider's numbers; `ours` is the time of our exact fused loss, if it ran."""
    units = dict(ms_median="ms", tokens_per_s="tokens/s", peak_extra_mib="MiB", max_rel_err="error")
    values = {unit: row[name] for name, unit in units.items() if row[name] is not None}
    name, ratio = row["name"], row["ratio_to_floor"]
    fused = name.startswith("lopd_fast fused")
    if row["note"] or ratio is None:
        bench.note(f"{what}: {row['note']}", values, ok=False if fused else None)
    elif fused:
        filtered = "grad_filter" in name
        bench.at_most(what, FILTERED if filtered else EXACT, "of floor", ratio, values)
        if not filtered:
            bench.at_most(f"{what}, extra peak", PEAK_MIB, "MiB", row["peak_extra_mib"])
    elif name.startswith(PEERS) and ours is not None:
        bench.at_least(what, FASTER, "times ours", row["ms_median"] / ours, values)
    else:
        bench.note(what, {"of floor": ratio} | values)


def sweep(bench: Bench, rows: int) -> None:
    """Times of what could be chosen otherwise: rows per chunk, and the launches of the streaming kernels."""
    problem = bench.problem(rows)
    for size in (2,) if bench.small else (256, 512, 1024, 2048):

        def step(size: int = size) -> None:
            out = fused_linear_topk_tail_kl(
                problem.student_hidden,
                problem.weight,
                problem.teacher_hidden,
                k=bench.k,
                chunk_size=size,
                backend="triton",
            )
            problem.gradients(out.loss, "student", "teacher")

        bench.note(f"fused, {rows} rows, chunks of {size}", dict(ms=bench.milliseconds(step=step)["step"]))
    x = bench.randn(2 if bench.small else 2048, bench.vocab, seed=1)
    for what, call, moved in launches(x, bench.k):
        taken = bench.milliseconds(step=call)["step"]
        bench.note(what, {"ms": taken, "TB/s": 1e-9 * moved / taken})


def launches(x: Tensor, k: int) -> Iterator[tuple[str, Callable[[], Any], int]]:
    """Both streaming kernels on fp32 logits x  # (R, V) under several launches, with the bytes that they move; the
    modules are left as they were."""
    kept = dict(block_stats.LAUNCH), dict(logits_grad.LAUNCH)
    read, rows = Logits(x), len(x)
    ids = torch.arange(k, device=x.device).repeat(rows, 1)
    row, support, out = x.new_zeros(rows), x.new_zeros(rows, k), torch.empty_like(x, dtype=torch.bfloat16)
    side = (support, row, row, support, row)
    try:
        for blocks, warps in ((32, 4), (64, 4), (64, 8), (128, 8)):
            block_stats.LAUNCH.update(BLOCKS=blocks, num_warps=warps)
            moved = block_stats.bytes_moved(rows, x.shape[1], 4)
            what = f"block_stats, fp32, {blocks} blocks, {warps} warps"
            yield what, lambda: block_stats.block_stats(read), moved
        for tile, warps in ((2048, 4), (4096, 8), (4096, 4), (8192, 8)):
            logits_grad.LAUNCH.update(TILE=tile, num_warps=warps)
            moved = logits_grad.bytes_moved(rows, x.shape[1], 4, 2, k)
            what = f"logits_grad, fp32 to bf16, {tile} columns, {warps} warps"
            yield what, lambda: logits_grad.logits_grad(read, out, None, ids, side, row, None, None), moved
    finally:
        block_stats.LAUNCH.update(kept[0])
        logits_grad.LAUNCH.update(kept[1])
