"""Parts of `gpu_check.py`: every kernel and the public functions against fp64, at real sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from gpu_bench import Bench
from measure import relative_error
from torch import Tensor

from lopd_fast import fused_linear_topk_tail_kl, topk_tail_kl
from lopd_fast.kernels._common import Logits
from lopd_fast.kernels.block_stats import block_stats, block_stats_ref
from lopd_fast.kernels.bucket_divergence import bucket_divergence
from lopd_fast.kernels.logits_grad import logits_grad, logits_grad_ref
from lopd_fast.kernels.select_support import select_support, select_support_ref
from lopd_fast.kernels.support_logprobs import support_logprobs, support_logprobs_ref
from lopd_fast.loss_divergence import bucket_divergence as bucket_divergence_ref

FP32, HALF = 2e-5, 6e-3  # relative errors that gradients may have
DIVERGENCES, TAILS = ("reverse_kl", "forward_kl", "jsd"), ("bucket", "renormalize", "drop")


def kernels(bench: Bench) -> None:
    """Every kernel against its fp64 reference, over dtypes, ways of reading and support sizes; then far-apart rows."""
    capped = dict(bias=bench.randn(bench.vocab, seed=3), gain=0.05, cap_gain=20.0)
    cases: list[tuple[torch.dtype, int, dict[str, Any]]] = [(torch.bfloat16, bench.k, {})]
    cases += [(torch.float32, bench.k, capped), (torch.bfloat16, 1, {})]
    if not bench.small:
        cases += [(torch.bfloat16, 127, {}), (torch.float16, bench.k, {}), (torch.float32, bench.k, {})]
    for dtype, k, reading in cases:
        x = bench.peaked(2 if bench.small else 128, seed=1).to(dtype)
        wide = dict(reading)
        if reading:
            x = torch.stack([x, x], -1).flatten(-2)[:, ::2]  # columns two apart
            wide["bias"] = reading["bias"].double()
        name = f"{str(dtype).removeprefix('torch.')} k={k}{' strided bias soft-cap' if reading else ''}"
        each_kernel(bench, name, Logits(x, **reading), Logits(x.double(), **wide), k)
    far_rows(bench)


def each_kernel(bench: Bench, name: str, logits: Logits, wide: Logits, k: int) -> None:
    stats = block_stats(logits)
    worst = max(map(relative_error, stats, block_stats_ref(wide)))
    bench.at_most(f"block_stats {name}", 1e-5, "error", worst)

    ids, want = select_support(logits, stats[0], k), select_support_ref(wide, k)
    if logits.cap_gain is None:
        bench.at_most(f"select {name}", 0, "error", float((ids != want).sum()))
    else:  # a soft-cap may round two logits to one: then only their values are determined
        z = wide.values()
        bench.at_most(f"select {name}", 1e-6, "error", relative_error(z.gather(1, ids), z.gather(1, want)))

    labels = torch.arange(len(ids), device=bench.device) * 7 % bench.vocab
    got = support_logprobs(logits, stats, ids, labels)
    pairs = zip(got, support_logprobs_ref(wide, ids, labels), strict=True)
    worst = max(float((a.double() - b).abs().max()) for a, b in pairs if a is not None and b is not None)
    bench.at_most(f"support_logprobs {name}", 2e-5, "error", worst)

    log_support, log_tail, tail_lse, _ = got
    student, teacher = (log_support, log_tail), (log_support.roll(1, 0), log_tail.roll(1, 0))
    buckets = [torch.cat([support, tail[:, None]], 1).double() for support, tail in (student, teacher)]
    for divergence in DIVERGENCES:
        kl, *grads, _ = bucket_divergence(student, teacher, divergence=divergence, beta=0.3, tail="bucket")
        ref = bucket_divergence_ref(buckets[0], buckets[1], divergence, 0.3, complete=True)
        joined = [torch.cat([support, tail[:, None]], 1) for support, tail in grads]
        worst = max(map(relative_error, (kl, *joined), (ref.value, ref.student, ref.teacher)))
        bench.at_most(f"bucket_divergence {divergence} {name}", FP32, "error", worst)

    weight, margin, kl_tail = (bench.randn(len(ids), seed=seed) for seed in (5, 6, 7))
    side = (log_support, log_tail, tail_lse, bench.randn(*ids.shape, seed=8), kl_tail)
    exact: Any = tuple(x.double() for x in side)
    want = logits_grad_ref(wide, ids, exact, weight.double(), margin.double(), labels)
    for dtype in {logits.x.dtype, torch.bfloat16}:
        out = torch.full(logits.x.shape, float("nan"), dtype=dtype, device=bench.device)
        logits_grad(logits, out, None, ids, side, weight, margin, labels)
        most = FP32 if dtype == torch.float32 else HALF
        what = f"logits_grad {name} to {str(dtype).removeprefix('torch.')}"
        bench.at_most(what, most, "error", relative_error(out, want))


def far_rows(bench: Bench) -> None:
    """Rows whose start does not fit 32 bits give the bits of the same rows close together."""
    near = [bench.peaked(3, seed=seed).bfloat16() for seed in (1, 2)]
    far = []
    for x in near:
        memory = torch.empty(2**31 + bench.vocab, dtype=x.dtype, device=bench.device)
        far.append(memory.as_strided(x.shape, (2**30, 1)).copy_(x))
    labels, results = torch.tensor([0, 1, 2], device=bench.device), []
    for student, teacher in (near, far):
        leaves = [student.detach().requires_grad_(), teacher.detach().requires_grad_()]
        out = topk_tail_kl(*leaves, k=bench.k, labels=labels, backend="triton")
        grads = torch.autograd.grad(out.kl.sum(), leaves)
        logits = Logits(student)
        stats = block_stats(logits)
        log_support, log_tail, tail_lse, _ = support_logprobs(logits, stats, out.topk_ids, None)
        side = (log_support, log_tail, tail_lse, log_support, log_tail)
        in_place = logits_grad(logits, student, None, out.topk_ids, side, out.kl.detach(), None, None)
        results.append((out.kl, out.topk_ids, *grads, in_place))
    bench.yes("row x stride > 2^31 gives the same bits", all(map(torch.equal, *results)))


def loss(bench: Bench) -> None:
    """The public functions on the kernels against the torch backend in fp64."""
    rows = 3 if bench.small else 64
    student, teacher = bench.peaked(rows, 1).bfloat16(), bench.peaked(rows, 2).bfloat16()
    labels = torch.arange(rows, device=bench.device) * 11 % bench.vocab
    labels[1] = -100
    options: dict[str, Any] = dict(labels=labels, privilege_weight=bench.randn(rows, seed=3), k=bench.k)

    grid = [("jsd", "drop")] if bench.small else itertools.product(DIVERGENCES, TAILS)
    for divergence, tail in grid:
        which = dict(options, divergence=divergence, tail=tail, beta=0.3)
        compare(bench, f"logits {divergence} {tail}", topk_tail_kl, [student, teacher], which)
    student[1], teacher[1] = float("nan"), float("nan")
    compare(bench, "logits, NaN where nothing counts", topk_tail_kl, [student, teacher], options)

    hidden = bench.head(rows)
    for dtype in (torch.bfloat16, torch.float16):
        inputs = [x.to(dtype) for x in hidden]
        name = f"fused {str(dtype).removeprefix('torch.')}"
        which = dict(options, chunk_size=-(-rows // 2))
        compare(bench, f"{name}, head trains", fused_linear_topk_tail_kl, inputs, which)
        which = dict(options, logit_softcap=20.0, logit_scale=0.5, num_items=2**20)
        compare(bench, f"{name}, soft-cap", fused_linear_topk_tail_kl, inputs, which)
    without_waiting(bench)


def compare(
    bench: Bench, what: str, function: Callable[..., Any], inputs: list[Tensor], options: dict[str, Any]
) -> None:
    def run(backend: str, dtype: torch.dtype | None) -> list[Tensor]:
        leaves = [x.detach().to(dtype or x.dtype, copy=True).requires_grad_() for x in inputs]
        out = function(*leaves, backend=backend, **options)
        # As a loss scaler would: fp16 cannot hold the gradient of one row in 2^20.
        upstream = options.get("num_items", 3)
        return [out.kl.detach(), *torch.autograd.grad(upstream * out.loss, leaves)]

    first, second = run("triton", None), run("triton", None)
    exact = run("torch", torch.float64)
    bench.at_most(f"{what}: kl", FP32, "error", relative_error(first[0], exact[0]))
    bench.at_most(f"{what}: gradients", HALF, "error", max(map(relative_error, first[1:], exact[1:])))
    bench.yes(f"{what}: the same bits twice", all(map(torch.equal, first, second)))


def without_waiting(bench: Bench) -> None:
    """No result of the device is waited for between the chunks of the exact loss."""
    problem = bench.problem(4)

    def step() -> None:
        fused_linear_topk_tail_kl(
            problem.student_hidden,
            problem.weight,
            problem.teacher_hidden,
            k=bench.k,
            chunk_size=2,
            backend="triton",
        ).loss.backward()

    step()  # compiles
    quiet = True
    if bench.device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        except RuntimeError as error:
            quiet = False
            print(error)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    bench.yes("fused: no host synchronisation", quiet)
