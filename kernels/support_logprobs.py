"""Log-probs of a support, of everything else and of the label, from the statistics of blocks and a few re-read columns.

Per row, with S the support and z the logits,

    tail      = logsumexp of z outside S: blocks without an id of S by their statistics, the others read again
    lse       = log(sum over S of e^z + e^tail)
    results     z - lse on S, tail - lse, tail, z - lse at the label

Everything is relative to the row's maximum, and the tail never a difference 1 - sum, so a tail of 1e-12 keeps its
digits. Shapes: peak, total (R, ceil(V / 64)) from `block_stats`; ids (R, k) int64, -1 for padding. The backward is one
more pass over the logits (`logits_grad`).
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
    log1p,
    row_offset,
)


def bytes_moved(rows: int, width: int, itemsize: int, k: int) -> int:
    """All statistics and k blocks of logits, the ids and the results."""
    return rows * (8 * block_count(width) + BLOCK * k * itemsize + 12 * k + 12)


def flops(rows: int, width: int, k: int) -> int:
    return rows * (block_count(width) * (k + 4) + BLOCK * k * (k + 4))


# Blocks of which a program holds the statistics at a time. With other pairs of this and the warps below,
# bench/sass_report.py showed spills of 8 or 16 bytes on one generation or another.
TILE = 256


def support_launch(k: int, blocks: int) -> tuple[dict[str, int], int]:
    """Constants and warps of `support_logprobs_kernel`: at most 32 columns a thread of the held blocks."""
    lanes, tile = lane_count(k), min(TILE, max(16, triton.next_power_of_2(blocks)))
    constants = dict(K=k, LANES=lanes, TILES=triton.cdiv(blocks, tile), TILE=tile, BLOCK=BLOCK)
    return constants, 4 if lanes < 64 else 8


@triton.jit
def _tail_in_held_blocks(
    logits,
    ids_ptr,
    width,
    BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    K: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Maximum of z over the blocks that hold an id of the support, without those ids, and the sum of e^{z - that}."""
    lane = tl.arange(0, LANES)
    ids = tl.load(ids_ptr + lane, mask=lane < K, other=-1)
    held = tl.where(ids >= 0, ids // BLOCK, -1).to(tl.int32)  # (LANES,)
    columns = held[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]  # (LANES, 64)
    keep, first = columns < width, held >= 0  # first: each block once
    for i in range(K):
        one = tl.load(ids_ptr + i).to(tl.int32)
        first = first & ((held != tl.where(one >= 0, one // BLOCK, -1)) | (lane <= i))
        keep = keep & (columns != one)
    keep = keep & first[:, None]
    z = load_logits(logits, columns, keep, BIAS, SOFTCAP)
    peak = tl.max(tl.max(z, axis=1), axis=0)
    total = tl.sum(tl.sum(tl.exp(z - tl.where(peak == NEG_INF, 0.0, peak)), axis=1), axis=0)
    return peak, total


@triton.jit
def _with_free_blocks(
    peak,
    total,
    peak_ptr,
    total_ptr,
    ids_ptr,
    blocks,
    K: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The same maximum and sum, with all other blocks added by their statistics."""
    for start in range(0, TILES * TILE, TILE):
        block = start + tl.arange(0, TILE)
        free = block < blocks
        for i in range(K):
            one = tl.load(ids_ptr + i).to(tl.int32)
            free = free & (block != tl.where(one >= 0, one // BLOCK, -1))
        peaks = tl.load(peak_ptr + block, mask=free, other=NEG_INF)
        totals = tl.load(total_ptr + block, mask=free, other=0.0)
        new = tl.maximum(peak, tl.max(peaks, axis=0))
        base = tl.where(new == NEG_INF, 0.0, new)
        total = total * tl.exp(peak - base) + tl.sum(totals * tl.exp(peaks - base), axis=0)
        peak = new
    return peak, total


@triton.jit
def support_logprobs_kernel(
    logits_ptr,
    bias_ptr,
    offsets_ptr,
    column_stride,
    gain,
    cap_gain,
    peak_ptr,  # (R, blocks)
    total_ptr,  # (R, blocks)
    ids_ptr,  # (R, K)
    labels_ptr,  # (R,)
    log_support_ptr,  # (R, K)
    log_tail_ptr,  # (R,)
    tail_lse_ptr,  # (R,)
    log_label_ptr,  # (R,)
    width,
    blocks,
    BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIGNED: tl.constexpr,
    LABEL: tl.constexpr,
    K: tl.constexpr,
    LANES: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits = (logits_ptr + row_offset(offsets_ptr, row, ALIGNED), bias_ptr, column_stride, gain, cap_gain)
    ids_ptr += row * K
    peak, total = _tail_in_held_blocks(logits, ids_ptr, width, BIAS, SOFTCAP, K, LANES, BLOCK)
    peak_ptr += row * blocks
    total_ptr += row * blocks
    peak, total = _with_free_blocks(peak, total, peak_ptr, total_ptr, ids_ptr, blocks, K, TILES, TILE, BLOCK)

    lane = tl.arange(0, LANES)
    ids = tl.load(ids_ptr + lane, mask=lane < K, other=-1)
    z = load_logits(logits, ids, ids >= 0, BIAS, SOFTCAP)
    top = tl.maximum(tl.max(z, axis=0), peak)
    weights = tl.where(lane == K, tl.exp(peak - top) * total, tl.exp(z - top))
    # log of 1 + the rest, where 1 is taken off the largest: exact where that one holds nearly everything
    heaviest = tl.argmax(weights, axis=0)
    log_sum = log1p(tl.sum(tl.where(lane == heaviest, weights - 1, weights), axis=0))
    log_total = tl.where(total > 0, tl.log(tl.where(total > 0, total, 1.0)), NEG_INF)
    log_support = tl.where(ids >= 0, (z - top) - log_sum, NEG_INF)
    tl.store(log_support_ptr + row * K + lane, log_support, mask=lane < K)
    tl.store(log_tail_ptr + row, tl.where(total > 0, ((peak - top) + log_total) - log_sum, NEG_INF))
    tl.store(tail_lse_ptr + row, tl.where(total > 0, peak + log_total, 0.0))
    if LABEL:
        label = tl.load(labels_ptr + row)
        tl.store(log_label_ptr + row, (load_logits(logits, label, label >= 0, BIAS, SOFTCAP) - top) - log_sum)


def support_logprobs(
    logits: Logits, stats: tuple[Tensor, Tensor], ids: Tensor, labels: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """log_support (R, k), log_tail (R,), tail_lse (R,) and, given labels  # (R,) int64, log_label (R,); all fp32."""
    rows, k = ids.shape
    log_support = logits.x.new_empty(rows, k, dtype=torch.float32)
    log_tail, tail_lse, log_label = logits.x.new_empty(3, rows, dtype=torch.float32)
    if rows:
        blocks = block_count(logits.width)
        constants, warps = support_launch(k, blocks)
        support_logprobs_kernel[(rows,)](
            *logits.arguments(),
            *stats,
            ids.contiguous(),
            ids if labels is None else labels,
            log_support,
            log_tail,
            tail_lse,
            log_label,
            logits.width,
            blocks,
            **logits.flags(),
            LABEL=labels is not None,
            **constants,
            num_warps=warps,
        )
    return log_support, log_tail, tail_lse, None if labels is None else log_label


def support_logprobs_ref(
    logits: Logits, ids: Tensor, labels: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    z = logits.values()
    lse = z.logsumexp(-1, keepdim=True)
    padded = torch.nn.functional.pad(z, (0, 1), value=float("-inf"))  # the last column stands for padding
    columns = ids.masked_fill(ids < 0, logits.width)
    log_support = padded.gather(1, columns) - lse
    tail = padded.scatter(1, columns, float("-inf")).logsumexp(-1, keepdim=True)
    log_label = None if labels is None else (z.gather(1, labels[:, None]) - lse)[:, 0]
    tail_lse = tail.masked_fill(tail == float("-inf"), 0.0)
    return log_support, (tail - lse)[:, 0], tail_lse[:, 0], log_label
