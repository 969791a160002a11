"""What the compiler makes of the kernels: registers, spills, shared memory, occupancy, the time of their bytes.

    python bench/sass_report.py                            every kernel for sm_80, sm_90 and sm_100
    python bench/sass_report.py --arch sm_90 --json f.json
    python bench/sass_report.py --quick                    the most demanding configuration of each

Needs triton and no GPU. Each kernel is compiled as it is launched and its cubin is read with the cuobjdump that
triton brings. Predicted times are bytes / bandwidth at 3.35 TB/s (H100) and 4.8 TB/s (H200), for 40,960 rows: of
151,936 logits in the loss; tokens of a memory, or queries, of width 4,096 in the QFormer's attention. The exit status
is 1 if a kernel does not compile or spills; none of them keeps arrays, so all of a stack is spill.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # ahead of triton, which reads it when imported

import torch  # noqa: E402
import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from lopd_fast.kernels import (  # noqa: E402
    block_stats,
    bucket_divergence,
    logits_grad,
    perceiver_attention,
    perceiver_gradient,
    perceiver_tiles,
    select_support,
    support_logprobs,
)
from lopd_fast.kernels._common import BLOCK, block_count, lane_count  # noqa: E402

ROWS, WIDTH, K = 40_960, 151_936, 20
BANDWIDTH = {"ms_at_3.35_TB/s": 3.35e12, "ms_at_4.8_TB/s": 4.8e12}
SHARED_KIB = {80: 164, 90: 228, 100: 228}  # of an SM
ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
DIVERGENCES, TAILS = ("reverse_kl", "forward_kl", "jsd"), ("bucket", "renormalize", "drop")


@dataclass(frozen=True)
class Case:
    """One kernel with the constants of one launch."""

    function: Any
    config: str
    constants: dict[str, Any]
    warps: int
    bytes_per_row: float
    dtype: str = "fp32"  # of logits
    out_dtype: str = "fp32"  # of their gradient
    quick: bool = False  # the one of its kernel that needs the most registers
    stages: int = 3  # of a pipelined loop; triton's own choice


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", nargs="+", default=["sm_80", "sm_90", "sm_100"])
    parser.add_argument("--json", help="write the table to this file as well")
    parser.add_argument(
        "--quick", action="store_true", help="the most demanding configuration of each kernel"
    )
    options = parser.parse_args()
    rows = []
    columns = "registers spill_bytes stack_bytes shared_bytes programs_per_sm warps_per_sm bytes_per_row"
    print(
        f"{'kernel':>20} {'config':>34} {'arch':>6} " + " ".join(columns.replace("_", "-").split()) + "  ms"
    )
    for arch in options.arch:
        for case in cases():
            if options.quick and not case.quick:
                continue
            row = report(case, int(arch.removeprefix("sm_")))
            rows.append(row)
            values = " ".join(f"{row.get(name)!s:>{len(name)}}" for name in columns.split())
            times = " / ".join(f"{row[name]:.2f}" for name in BANDWIDTH)
            print(
                f"{row['kernel']:>20} {row['config']:>34} {arch:>6} {values}  {times} {row['note']}",
                flush=True,
            )
    if options.json:
        document = dict(triton=triton.__version__, rows=ROWS, width=WIDTH, k=K, kernels=rows)
        Path(options.json).write_text(json.dumps(document, indent=1), encoding="utf-8")
    return 1 if any(row["failed"] or row["spill_bytes"] for row in rows) else 0


PLAIN = dict(column_stride=1, BIAS=False, SOFTCAP=False, ALIGNED=True)
CAPPED = dict(BIAS=True, SOFTCAP=True, ALIGNED=False)  # columns with a stride, too
READS = {"": PLAIN, " strided bias softcap": CAPPED}
SUPPORTS = [1, K, 63, 127]


def cases() -> Iterator[Case]:
    """The launches of `lopd_fast.kernels`, over dtypes, ways of reading, support sizes and divergences."""
    for dtype, (name, flags) in itertools.product(["bf16", "fp32", "fp16"], READS.items()):
        constants = dict(block_stats.LAUNCH, **flags, BLOCK=BLOCK)
        warps = constants.pop("num_warps")
        moved = block_stats.bytes_moved(1, WIDTH, ITEMSIZE[dtype])
        quick = dtype == "fp32" and flags is CAPPED
        kernel = block_stats.block_stats_kernel
        yield Case(kernel, dtype + name, constants, warps, moved, dtype, quick=quick)

    yield from gradient_cases()

    blocks = block_count(WIDTH)
    for dtype, k, (name, flags) in itertools.product(["bf16", "fp32"], SUPPORTS, READS.items()):
        config, quick = f"{dtype} k={k}{name}", dtype == "fp32" and k == 127 and flags is CAPPED
        constants, warps = select_support.select_launch(k, blocks)
        constants |= flags
        moved = select_support.bytes_moved(1, WIDTH, ITEMSIZE[dtype], k)
        yield Case(select_support.select_kernel, config, constants, warps, moved, dtype, quick=quick)
        constants, warps = support_logprobs.support_launch(k, blocks)
        constants |= flags | dict(LABEL=True)
        moved = support_logprobs.bytes_moved(1, WIDTH, ITEMSIZE[dtype], k)
        kernel = support_logprobs.support_logprobs_kernel
        yield Case(kernel, config, constants, warps, moved, dtype, quick=quick)

    for k, divergence, tail in itertools.product(SUPPORTS, DIVERGENCES, TAILS):
        constants = dict(K=k, LANES=lane_count(k), DIVERGENCE=divergence, TAIL=tail)
        moved = bucket_divergence.bytes_moved(1, k)
        config, quick = f"k={k} {divergence} {tail}", (k, divergence, tail) == (127, "jsd", "bucket")
        if k == K or divergence == "jsd":
            kernel, warps = bucket_divergence.bucket_divergence_kernel, bucket_divergence.LAUNCH["num_warps"]
            yield Case(kernel, config, constants, warps, moved, quick=quick)

    yield from perceiver_cases()


def gradient_cases() -> Iterator[Case]:
    """Out of place as from logits, in place as in the fused loss, and into half precision as it does on a device."""
    for (dtype, out), k, (name, flags) in itertools.product(
        [("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32"), ("fp32", "bf16")], SUPPORTS, READS.items()
    ):
        if k != K and dtype != "fp32":
            continue
        constants = dict(logits_grad.LAUNCH, **flags, POSITION=dtype == out, MARGIN=True)
        constants |= logits_grad.support_constants(k)
        warps = constants.pop("num_warps")
        if flags is PLAIN:
            constants["out_column_stride"] = 1
        moved = logits_grad.bytes_moved(1, WIDTH, ITEMSIZE[dtype], ITEMSIZE[out], k)
        yield Case(
            logits_grad.logits_grad_kernel,
            f"{dtype} to {out} k={k}{name}",
            constants,
            warps,
            moved,
            dtype,
            out,
            quick=(dtype, out, k, flags) == ("fp32", "fp32", 127, CAPPED),
        )


def perceiver_cases() -> Iterator[Case]:
    """The QFormer's attention, 32 queries a sample, for heads of every size that backbones have; 256 is the widest."""
    kernels = (
        perceiver_attention.attend_chunk_kernel,
        perceiver_attention.attend_combine_kernel,
        perceiver_gradient.query_gradient_chunk_kernel,
        perceiver_gradient.latent_gradient_kernel,
        perceiver_gradient.memory_gradient_kernel,
    )
    dtypes = dict(bf16=torch.bfloat16, fp32=torch.float32, fp16=torch.float16)
    sizes = [64, 72, 80, 96, 128, 160, 256]
    for (name, dtype), dim, kernel in itertools.product(dtypes.items(), sizes, kernels):
        constants = perceiver_tiles.constants(kernel.__name__.removesuffix("_kernel"), 32, dim, dtype)
        warps, stages = constants.pop("num_warps"), constants.pop("num_stages")
        title = kernel.__name__
        alone = title.startswith(("attend_combine", "latent"))  # a row is a query, else a token of the memory
        row = dict(tokens=int(not alone), samples=int(alone), queries=1, heads=32, dim=128)
        passes = perceiver_gradient.bytes_moved(**row, itemsize=ITEMSIZE[name])
        if title.startswith("attend"):
            moved = perceiver_attention.bytes_moved(**row, itemsize=ITEMSIZE[name])
        else:
            moved = passes["memory_gradient" if title.startswith("memory") else "attend_backward"]
        quick = (name, dim) == (("bf16", 80) if alone else ("fp32", 160))
        yield Case(kernel, f"{name} D={dim}", constants, warps, moved, name, name, quick, stages)


def report(case: Case, arch: int) -> dict[str, Any]:
    row: dict[str, Any] = dict(
        kernel=case.function.__name__.removesuffix("_kernel"),
        config=case.config,
        arch=f"sm_{arch}",
        warps=case.warps,
        bytes_per_row=round(case.bytes_per_row),
        registers=None,
        spill_bytes=None,
        stack_bytes=None,
        shared_bytes=None,
        failed=False,
        note="",
    )
    row |= {name: round(1e3 * ROWS * case.bytes_per_row / rate, 3) for name, rate in BANDWIDTH.items()}
    try:
        compiled = compile_case(case, arch)
    except Exception as error:  # whatever the compiler raises is the finding
        row |= dict(failed=True, note=f"does not compile: {type(error).__name__}: {str(error)[:200]}")
        return row
    row["shared_bytes"] = compiled.metadata.shared
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        done = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True)
    usage = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", done.stdout))
    if not usage:
        row["note"] = (
            f"compiled; this cuobjdump does not read it: {(done.stderr or done.stdout).strip()[:120]}"
        )
        return row
    registers, stack = int(usage["REG"]), int(usage["STACK"]) + int(usage["LOCAL"])
    programs = min(
        32,
        64 // case.warps,
        65536 // (-(-registers // 8) * 8 * 32 * case.warps),
        SHARED_KIB.get(arch, 100) * 1024 // (compiled.metadata.shared + 1024),
    )
    return row | dict(
        registers=registers,
        stack_bytes=stack,
        spill_bytes=stack,
        programs_per_sm=programs,
        warps_per_sm=programs * case.warps,
    )


INPUT_POINTERS = {"logits_ptr", "query_ptr", "d_out_ptr", "key_ptr", "value_ptr"}
INPUT_POINTERS |= {"d_query_ptr", "d_key_ptr", "d_value_ptr"}  # gradients, in the dtype of the inputs
PERCEIVER_STRIDES = ("query", "d_out", "memory", "latent", "d_memory", "d_latent")
PERCEIVER_STRIDES = tuple(f"{name}_stride" for name in PERCEIVER_STRIDES)


def compile_case(case: Case, arch: int) -> Any:
    names, signature = case.function.arg_names, {}
    for name in names:
        if name in case.constants:
            signature[name] = "constexpr"
        elif name in INPUT_POINTERS:
            signature[name] = "*" + case.dtype
        elif name == "out_ptr":
            signature[name] = "*" + case.out_dtype
        elif name.endswith("_ptr"):
            index = ("offsets_ptr", "ids_ptr", "labels_ptr", "position_ptr", "chunk_ptr", "chunk_range_ptr")
            signature[name] = "*i64" if name.endswith(index) else "*fp32"
        else:
            signature[name] = "fp32" if name.endswith("gain") or name in ("beta", "scale") else "i32"
    divisible = [["tt.divisibility", 16]]
    attributes = {
        (i,): divisible
        for i, name in enumerate(names)
        if name.endswith("_ptr") or name in ("width", "out_row_stride", *PERCEIVER_STRIDES)
    }
    constants = {(names.index(name),): value for name, value in case.constants.items()}
    source = ASTSource(fn=case.function, signature=signature, constexprs=constants, attrs=attributes)
    options = dict(num_warps=case.warps, num_stages=case.stages)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


if __name__ == "__main__":
    sys.exit(main())
