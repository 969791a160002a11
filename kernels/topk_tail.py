"""The divergence of a row and all that its gradient needs, from the statistics of blocks and a few re-read columns.

Per row and side, with S the support and z the logits,

    tail      = logsumexp of z outside S: blocks without an id of S by their statistics, the others read again
    lse       = log(sum over S of e^z + e^tail),   s = z - lse on S and at the label,   s_tail = tail - lse
    D, dD/dz  = `bucket_divergence` of the two sides, mass = sum over S of e^s

Everything is relative to the row's maximum, and the tail never a difference 1 - sum, so a tail of 1e-12 keeps its
digits. Shapes: ids (R, k) int64, -1 for padding; results in two buffers, see VECTORS and SCALARS. The backward needs
those and one more pass over the logits (`logits_grad`).
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
    expm1,
    lane_count,
    load_logits,
    log1p,
    row_offset,
)
from lopd_fast.kernels.bucket_divergence import bucket_divergence

# Rows of the two result buffers: (4, R, k) and (11, R), fp32.
VECTORS = ("s_log_support", "t_log_support", "s_kl_support", "t_kl_support")
SCALARS = (
    "kl",
    "s_log_tail",
    "t_log_tail",
    "s_tail_lse",
    "t_tail_lse",
    "s_kl_tail",
    "t_kl_tail",
    "s_mass",
    "t_mass",
    "s_label",
    "t_label",
)


def bytes_moved(rows: int, width: int, itemsize: int, k: int) -> int:
    """Per side all statistics and k blocks of logits; the results."""
    return rows * (2 * (8 * block_count(width) + BLOCK * k * itemsize) + 24 * k + 44)


def flops(rows: int, width: int, k: int) -> int:
    return rows * 2 * (block_count(width) * (k + 4) + BLOCK * k * (k + 4))


# Blocks of which a program holds the statistics at a time; with 1024, bench/sass_report.py shows spills.
TILE = 512


def rows_launch(k: int, blocks: int) -> tuple[dict[str, int], int]:
    """Constants and warps of `rows_kernel`."""
    lanes, tile = lane_count(k), min(TILE, max(16, triton.next_power_of_2(blocks)))
    constants = dict(K=k, LANES=lanes, TILES=triton.cdiv(blocks, tile), TILE=tile, BLOCK=BLOCK)
    return constants, 4 if lanes <= 32 else 8


@triton.jit
def _tail(
    logits_ptr,
    bias_ptr,
    offset,
    column_stride,
    gain,
    cap_gain,
    peak_ptr,
    total_ptr,
    ids_ptr,
    width,
    blocks,
    BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    K: tl.constexpr,
    LANES: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Maximum of z outside the support, and the sum of e^{z - that}."""
    lane = tl.arange(0, LANES)
    ids = tl.load(ids_ptr + lane, mask=lane < K, other=-1)

    # Blocks that hold an id of the support, each once, without the ids themselves.
    held = tl.where(ids >= 0, ids // BLOCK, -1).to(tl.int32)  # (LANES,)
    columns = held[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]  # (LANES, 64)
    keep = (held >= 0)[:, None] & (columns < width)
    for i in range(K):
        one = tl.load(ids_ptr + i).to(tl.int32)
        first = (held != tl.where(one >= 0, one // BLOCK, -1)) | (lane <= i)
        keep = keep & (columns != one) & first[:, None]
    z = load_logits(logits_ptr, bias_ptr, offset, columns, keep, column_stride, gain, cap_gain, BIAS, SOFTCAP)
    largest = tl.max(tl.max(z, axis=1), axis=0)
    total = tl.sum(tl.sum(tl.exp(z - tl.where(largest == NEG_INF, 0.0, largest)), axis=1), axis=0)

    # All other blocks, by their statistics.
    for start in range(0, TILES * TILE, TILE):
        block = start + tl.arange(0, TILE)
        free = block < blocks
        for i in range(K):
            one = tl.load(ids_ptr + i).to(tl.int32)
            free = free & (block != tl.where(one >= 0, one // BLOCK, -1))
        peak = tl.load(peak_ptr + block, mask=free, other=NEG_INF)
        sums = tl.load(total_ptr + block, mask=free, other=0.0)
        new = tl.maximum(largest, tl.max(peak, axis=0))
        base = tl.where(new == NEG_INF, 0.0, new)
        total = total * tl.exp(largest - base) + tl.sum(sums * tl.exp(peak - base), axis=0)
        largest = new
    return largest, total


@triton.jit
def _side(
    logits_ptr,
    bias_ptr,
    offset,
    column_stride,
    gain,
    cap_gain,
    peak_ptr,
    total_ptr,
    ids_ptr,
    label,
    width,
    blocks,
    BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LABEL: tl.constexpr,
    K: tl.constexpr,
    LANES: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Log-probs of support (LANES,), tail and label, and the tail's lse."""
    peak, total = _tail(
        logits_ptr,
        bias_ptr,
        offset,
        column_stride,
        gain,
        cap_gain,
        peak_ptr,
        total_ptr,
        ids_ptr,
        width,
        blocks,
        BIAS,
        SOFTCAP,
        K,
        LANES,
        TILES,
        TILE,
        BLOCK,
    )
    lane = tl.arange(0, LANES)
    ids = tl.load(ids_ptr + lane, mask=lane < K, other=-1)
    z = load_logits(logits_ptr, bias_ptr, offset, ids, ids >= 0, column_stride, gain, cap_gain, BIAS, SOFTCAP)
    top = tl.maximum(tl.max(z, axis=0), peak)
    weights = tl.exp(z - top)
    tail_weight = tl.exp(peak - top) * total
    weights = tl.where(lane == K, tail_weight, weights)
    # log of 1 + the rest, where 1 is taken off the largest: exact where that one holds nearly everything
    heaviest = tl.argmax(weights, axis=0)
    log_sum = log1p(tl.sum(tl.where(lane == heaviest, weights - 1, weights), axis=0))
    log_total = tl.where(total > 0, tl.log(tl.where(total > 0, total, 1.0)), NEG_INF)
    log_support = tl.where(ids >= 0, (z - top) - log_sum, NEG_INF)
    log_tail = tl.where(total > 0, ((peak - top) + log_total) - log_sum, NEG_INF)
    tail_lse = tl.where(total > 0, peak + log_total, 0.0)
    label_logprob = 0.0
    if LABEL:
        at = load_logits(
            logits_ptr,
            bias_ptr,
            offset,
            label,
            label >= 0,
            column_stride,
            gain,
            cap_gain,
            BIAS,
            SOFTCAP,
        )
        label_logprob = (at - top) - log_sum
    return log_support, log_tail, tail_lse, label_logprob


@triton.jit
def _mass(log_support, log_tail):
    """From the tail where that is the smaller, so that rounding never passes 1."""
    return tl.where(log_tail < -0.7, -expm1(log_tail), tl.sum(tl.exp(log_support), axis=0))


@triton.jit
def rows_kernel(
    s_logits_ptr,
    s_bias_ptr,
    s_offsets_ptr,
    s_column_stride,
    s_gain,
    s_cap_gain,
    s_peak_ptr,
    s_total_ptr,
    t_logits_ptr,
    t_bias_ptr,
    t_offsets_ptr,
    t_column_stride,
    t_gain,
    t_cap_gain,
    t_peak_ptr,
    t_total_ptr,
    ids_ptr,  # (R, K)
    labels_ptr,  # (R,)
    vectors_ptr,  # (4, R, K); a served teacher's log-probs are there already
    scalars_ptr,  # (11, R); and its tail
    rows,
    width,
    blocks,
    beta,
    S_BIAS: tl.constexpr,
    S_SOFTCAP: tl.constexpr,
    S_ALIGNED: tl.constexpr,
    T_BIAS: tl.constexpr,
    T_SOFTCAP: tl.constexpr,
    T_ALIGNED: tl.constexpr,
    SERVED: tl.constexpr,
    LABEL: tl.constexpr,
    DIVERGENCE: tl.constexpr,
    TAIL: tl.constexpr,
    K: tl.constexpr,
    LANES: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    ids_ptr += row * K
    vectors_ptr += row * K
    scalars_ptr += row
    step = rows.to(tl.int64)
    label = -1
    if LABEL:
        label = tl.load(labels_ptr + row)

    s_support, s_tail, s_lse, s_label = _side(
        s_logits_ptr,
        s_bias_ptr,
        row_offset(s_offsets_ptr, row, S_ALIGNED),
        s_column_stride,
        s_gain,
        s_cap_gain,
        s_peak_ptr + row * blocks,
        s_total_ptr + row * blocks,
        ids_ptr,
        label,
        width,
        blocks,
        S_BIAS,
        S_SOFTCAP,
        LABEL,
        K,
        LANES,
        TILES,
        TILE,
        BLOCK,
    )
    if SERVED:
        t_support = tl.load(vectors_ptr + step * K + lane, mask=lane < K, other=NEG_INF)
        t_tail = tl.load(scalars_ptr + 2 * step)
    else:
        t_support, t_tail, t_lse, t_label = _side(
            t_logits_ptr,
            t_bias_ptr,
            row_offset(t_offsets_ptr, row, T_ALIGNED),
            t_column_stride,
            t_gain,
            t_cap_gain,
            t_peak_ptr + row * blocks,
            t_total_ptr + row * blocks,
            ids_ptr,
            label,
            width,
            blocks,
            T_BIAS,
            T_SOFTCAP,
            LABEL,
            K,
            LANES,
            TILES,
            TILE,
            BLOCK,
        )
        tl.store(vectors_ptr + step * K + lane, t_support, mask=lane < K)
        tl.store(scalars_ptr + 2 * step, t_tail)
        tl.store(scalars_ptr + 4 * step, t_lse)
        tl.store(scalars_ptr + 10 * step, t_label)

    kl, s_grad, t_grad, s_rest, t_rest = bucket_divergence(
        s_support, s_tail, t_support, t_tail, beta, DIVERGENCE, TAIL, K, LANES
    )
    tl.store(vectors_ptr + lane, s_support, mask=lane < K)
    tl.store(vectors_ptr + 2 * step * K + lane, s_grad, mask=lane < K)
    tl.store(vectors_ptr + 3 * step * K + lane, t_grad, mask=lane < K)
    tl.store(scalars_ptr, kl)
    tl.store(scalars_ptr + step, s_tail)
    tl.store(scalars_ptr + 3 * step, s_lse)
    tl.store(scalars_ptr + 5 * step, s_rest)
    tl.store(scalars_ptr + 6 * step, t_rest)
    tl.store(scalars_ptr + 7 * step, _mass(s_support, s_tail))
    tl.store(scalars_ptr + 8 * step, _mass(t_support, t_tail))
    tl.store(scalars_ptr + 9 * step, s_label)


def rows_forward(
    student: Logits,
    student_stats: tuple[Tensor, Tensor],
    teacher: Logits | None,
    teacher_stats: tuple[Tensor, Tensor] | None,
    served: tuple[Tensor, Tensor] | None,
    ids: Tensor,
    labels: Tensor | None,
    *,
    divergence: str,
    beta: float,
    tail: str,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The results by name: VECTORS, each (R, k), and SCALARS, each (R,).

    teacher, or served  # log-probs (R, k) of ids and log-prob (R,) of the tail
    labels              # (R,) int64
    """
    rows, k = ids.shape
    vectors = student.x.new_empty(len(VECTORS), rows, k, dtype=torch.float32)
    scalars = student.x.new_empty(len(SCALARS), rows, dtype=torch.float32)
    if served is not None:
        vectors[1], scalars[2] = served
        teacher, teacher_stats = student, student_stats  # never read
    assert teacher is not None and teacher_stats is not None
    if rows:
        blocks = block_count(student.width)
        constants, warps = rows_launch(k, blocks)
        flags = {f"S_{name}": value for name, value in student.flags().items()}
        flags |= {f"T_{name}": value for name, value in teacher.flags().items()}
        rows_kernel[(rows,)](
            *student.arguments(),
            *student_stats,
            *teacher.arguments(),
            *teacher_stats,
            ids.contiguous(),
            ids if labels is None else labels,
            vectors,
            scalars,
            rows,
            student.width,
            blocks,
            float(beta),
            **flags,
            SERVED=served is not None,
            LABEL=labels is not None,
            DIVERGENCE=divergence,
            TAIL=tail,
            **constants,
            num_warps=warps,
        )
    return dict(zip(VECTORS, vectors, strict=True)), dict(zip(SCALARS, scalars, strict=True))
