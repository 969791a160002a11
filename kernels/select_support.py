"""The k largest logits of a row, ties to the lowest id, without a sort over V.

Only the k blocks with the largest maxima can hold one of them, since an element of any other block is preceded by
those k maxima; and by the same argument only the k groups of 64 blocks with the largest maxima can hold one of those
blocks. So three times the k best: of groups, of 64 k blocks, of 64 k columns. Shapes: peak (R, ceil(V / 64)) from
`block_stats`, ids (R, k) int64 by falling logit. There is no backward.
"""

# A type checker takes a kernel for the plain function under @triton.jit.
# pyright: reportCallIssue=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from lopd_fast.kernels._common import (
    BLOCK,
    NEG_INF,
    Logits,
    block_count,
    lane_count,
    load_logits,
    row_offset,
)

MISSING = tl.constexpr(-(2**63))  # the key of nothing


def bytes_moved(rows: int, width: int, itemsize: int, k: int) -> int:
    """All maxima of blocks, those of k groups again, k blocks of logits, the ids."""
    return rows * (4 * block_count(width) + 4 * 64 * k + BLOCK * k * itemsize + 8 * k)


def flops(rows: int, width: int, k: int) -> int:
    return rows * k * (block_count(width) // 64 + 2 * 64 * k) * 4


def select_launch(k: int, blocks: int) -> tuple[dict[str, int], int]:
    """Constants and warps of `select_kernel`: lanes x 64 candidates are 16 numbers a thread, or 32 beyond 32 lanes."""
    lanes, groups = lane_count(k), max(16, triton.next_power_of_2(triton.cdiv(blocks, 64)))
    return dict(K=k, LANES=lanes, GROUPS=groups, BLOCK=BLOCK), 4 if lanes <= 32 else 8


@triton.jit
def _key(z, position):
    """An int64 whose order is that of (z, lower position): no two are equal. -0 counts as 0."""
    bits = (z + 0.0).to(tl.int32, bitcast=True)
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (rising.to(tl.int64) << 32) | (0x7FFFFFFF - position).to(tl.int64)


@triton.jit
def _best(keys, K: tl.constexpr, LANES: tl.constexpr):
    """Positions (LANES,) of the K largest keys  # (A,) or (A, B), by falling key; -1 where there are fewer."""
    lane = tl.arange(0, LANES)
    found = tl.full((LANES,), -1, tl.int32)
    for i in range(K):
        if len(keys.shape) == 2:
            largest = tl.max(tl.max(keys, axis=1), axis=0)
        else:
            largest = tl.max(keys, axis=0)
        position = (0x7FFFFFFF - (largest & 0x7FFFFFFF)).to(tl.int32)
        position = tl.where(largest == MISSING, -1, position)
        found = tl.where(lane == i, position, found)
        keys = tl.where(keys == largest, MISSING, keys)
    return found


@triton.jit
def select_kernel(
    logits_ptr,
    bias_ptr,
    offsets_ptr,
    column_stride,
    gain,
    cap_gain,
    peak_ptr,  # (R, blocks)
    ids_ptr,  # (R, K)
    width,
    blocks,
    BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIGNED: tl.constexpr,
    K: tl.constexpr,
    LANES: tl.constexpr,
    GROUPS: tl.constexpr,  # of 64 blocks, to a power of 2
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    inner = tl.arange(0, 64)
    group = tl.arange(0, GROUPS)
    peak_ptr += row * blocks

    block = group[:, None] * 64 + inner[None, :]  # (GROUPS, 64)
    peak = tl.max(tl.load(peak_ptr + block, mask=block < blocks, other=NEG_INF), axis=1)
    group = _best(tl.where(group * 64 < blocks, _key(peak, group), MISSING), K, LANES)

    block = group[:, None] * 64 + inner[None, :]  # (LANES, 64)
    there = (group >= 0)[:, None] & (block < blocks)
    peak = tl.load(peak_ptr + block, mask=there, other=NEG_INF)
    block = _best(tl.where(there, _key(peak, block), MISSING), K, LANES)

    columns = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]  # (LANES, 64)
    there = (block >= 0)[:, None] & (columns < width)
    logits = (logits_ptr + row_offset(offsets_ptr, row, ALIGNED), bias_ptr, column_stride, gain, cap_gain)
    z = load_logits(logits, columns, there, BIAS, SOFTCAP)
    ids = _best(tl.where(there, _key(z, columns), MISSING), K, LANES)
    tl.store(ids_ptr + row * K + lane, ids.to(tl.int64), mask=lane < K)


def select_support(logits: Logits, peak: Tensor, k: int) -> Tensor:
    """ids  # (R, k) int64 of the k largest logits, by falling logit, ties to the lowest id"""
    ids = logits.offsets.new_empty(logits.count, k)
    if logits.count:
        blocks = block_count(logits.width)
        constants, warps = select_launch(k, blocks)
        select_kernel[(logits.count,)](
            *logits.arguments(),
            peak,
            ids,
            logits.width,
            blocks,
            **logits.flags(),
            **constants,
            num_warps=warps,
        )
    return ids


def select_support_ref(logits: Logits, k: int) -> Tensor:
    return torch.sort(logits.values(), dim=-1, descending=True, stable=True)[1][:, :k]
