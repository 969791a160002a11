"""One streaming pass over logits: the maximum and the sum of exponentials of every block of 64 columns.

    peak[n, b]  = max over block b of z_n,             -inf where all of it is -inf
    total[n, b] = sum over block b of e^{z - peak},    0 there

z is the logit that `_common` makes of the raw one. Shapes: logits (N, V), any strides and float dtype; peak and total
(N, ceil(V / 64)) fp32. Nothing else of the forward reads a whole row. There is no backward: both are statistics.
"""

# A type checker takes a kernel for the plain function under @triton.jit.
# pyright: reportCallIssue=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from lopd_fast.kernels._common import BLOCK, NEG_INF, Logits, block_count, load_logits, row_offset


def bytes_moved(rows: int, width: int, itemsize: int) -> int:
    return rows * (width * itemsize + 8 * block_count(width))


def flops(rows: int, width: int) -> int:
    return rows * width * 4  # scale, compare, exponential, add


# Blocks a program takes, warps: 64 x 64 columns in 4 warps are 32 numbers a thread. bench/sass_report.py shows no
# spill, and for sm_90 without a soft-cap 16 resident programs an SM.
LAUNCH = dict(BLOCKS=64, num_warps=4)


@triton.jit
def block_stats_kernel(
    logits_ptr,
    bias_ptr,
    offsets_ptr,
    column_stride,
    gain,
    cap_gain,
    peak_ptr,  # (R, blocks)
    total_ptr,  # (R, blocks)
    width,
    blocks,
    tiles,  # programs a row
    BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    row = (program // tiles).to(tl.int64)
    block = (program % tiles) * BLOCKS + tl.arange(0, BLOCKS)  # (BLOCKS,)
    columns = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]  # (BLOCKS, 64)
    logits = (logits_ptr + row_offset(offsets_ptr, row, ALIGNED), bias_ptr, column_stride, gain, cap_gain)
    z = load_logits(logits, columns, columns < width, BIAS, SOFTCAP)
    peak = tl.max(z, axis=1)  # (BLOCKS,)
    total = tl.sum(tl.exp(z - tl.where(peak == NEG_INF, 0.0, peak)[:, None]), axis=1)
    at = row * blocks + block
    tl.store(peak_ptr + at, peak, mask=block < blocks)
    tl.store(total_ptr + at, total, mask=block < blocks)


def block_stats(logits: Logits) -> tuple[Tensor, Tensor]:
    """peak, total  # (R, ceil(V / 64)) fp32"""
    blocks = block_count(logits.width)
    peak, total = logits.x.new_empty(2, logits.count, blocks, dtype=torch.float32)
    if logits.count:
        tiles = triton.cdiv(blocks, LAUNCH["BLOCKS"])
        block_stats_kernel[(logits.count * tiles,)](
            *logits.arguments(),
            peak,
            total,
            logits.width,
            blocks,
            tiles,
            **logits.flags(),
            BLOCK=BLOCK,
            **LAUNCH,
        )
    return peak, total


def block_stats_ref(logits: Logits) -> tuple[Tensor, Tensor]:
    z = logits.values()
    padding = block_count(logits.width) * BLOCK - logits.width
    z = torch.nn.functional.pad(z, (0, padding), value=float("-inf")).unflatten(1, (-1, BLOCK))
    peak = z.amax(-1)
    total = (z - peak.masked_fill(peak == float("-inf"), 0.0)[..., None]).exp().sum(-1)
    return peak, total
