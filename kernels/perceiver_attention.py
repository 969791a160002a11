"""Attention of a few queries a sample over [memory ; latents], memories being ragged: few queries, many keys.

    S = q [K ; K']^T / sqrt(D),   lse = logsumexp(S),   P = exp(S - lse),   out = P [V ; V']

Shapes: q, out (B, Q, H, D); K, V of the memory (T, H, D), sample b being rows offsets[b]:offsets[b + 1]; K', V' of the
latents (B, Q, H, D); lse (B, H, Q) fp32. Backward, in perceiver_gradient.py, needs the inputs, out and lse.

The keys of a sample are split into chunks. A program takes one chunk, head and block of queries and leaves an fp32
partial sum, its normaliser and its maximum; one program a sample, head and block attends to the latents themselves
and adds the chunks in their order. So a sample without memory is one without chunks.

All three passes: attend, attend_backward, memory_gradient.
"""

# A type checker takes a kernel for the plain function under @triton.jit.
# pyright: reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from lopd_fast.kernels.perceiver_gradient import attend_backward, memory_gradient
from lopd_fast.kernels.perceiver_tiles import (
    add_weighted,
    chunk_keys,
    chunk_table,
    constants,
    halves,
    inner,
    load_tile,
    store_tile,
    whole_rows,
)

__all__ = ["attend", "attend_backward", "memory_gradient"]


def bytes_moved(tokens: int, samples: int, queries: int, heads: int, dim: int, itemsize: int) -> int:
    """Keys and values of the memory once, and q, K', V', out; partial sums left out."""
    return (2 * tokens + 4 * samples * queries) * heads * dim * itemsize


def flops(tokens: int, samples: int, queries: int, heads: int, dim: int) -> int:
    """Two products of every query and key."""
    return 4 * (tokens + samples * queries) * queries * heads * dim


@triton.jit
def attend_rows(
    asked,  # pointer, int64 offsets of rows and validity of some queries
    key_ptr,
    value_ptr,
    stride,
    start,
    end,
    head,
    scale,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Attention to the keys of rows start:end: highest score, normaliser and weighted sum of the values."""
    peak = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    sums = tl.zeros((BLOCK_Q, WIDTH), tl.float32)
    for first in range(start, end, BLOCK_K):
        key = (first + tl.arange(0, BLOCK_K)).to(tl.int64)  # the interpreter counts in 32 bits
        here = key < end
        key_row = key * stride + head * D
        scores = inner(asked, (key_ptr, key_row, here), D, STEP, DTYPE) * scale
        scores = tl.where(here[None, :], scores, float("-inf"))
        values = load_tile(value_ptr, key_row, here, 0, WIDTH, D, DTYPE)
        higher = tl.maximum(peak, tl.max(scores, 1))
        shrink = tl.exp(peak - higher)
        weights = tl.exp(scores - higher[:, None])
        total = total * shrink + tl.sum(weights, 1)
        sums = add_weighted(sums * shrink[:, None], weights, values)
        peak = higher
    return peak, total, sums


@triton.jit
def attend_chunk_kernel(
    query_ptr,
    query_stride,  # of a row of (B * Q)
    key_ptr,
    value_ptr,
    memory_stride,  # of a token
    chunk_ptr,  # (chunks, 3) int64: sample, first and last row
    partial_ptr,  # (chunks, H, Q, D) fp32
    peak_ptr,  # (chunks, H, Q) fp32
    total_ptr,
    scale,
    queries,
    heads,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    chunk = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    query = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    valid = query < queries
    sample = tl.load(chunk_ptr + 3 * chunk)
    start = tl.load(chunk_ptr + 3 * chunk + 1)
    end = tl.load(chunk_ptr + 3 * chunk + 2)
    asked = (query_ptr, (sample * queries + query) * query_stride + head * D, valid)
    peak, total, sums = attend_rows(
        *(asked, key_ptr, value_ptr, memory_stride, start, end, head, scale),
        *(D, WIDTH, STEP, DTYPE, BLOCK_Q, BLOCK_K),
    )
    row = (chunk * heads + head) * queries + query
    store_tile(partial_ptr, row * D, valid, sums, D)
    tl.store(peak_ptr + row, peak, mask=valid)
    tl.store(total_ptr + row, total, mask=valid)


@triton.jit
def attend_combine_kernel(
    query_ptr,
    query_stride,
    key_ptr,  # of the latents
    value_ptr,
    latent_stride,  # of a row of (B * Q)
    chunk_range_ptr,  # (B + 1,) int64: a sample's chunks
    partial_ptr,
    peak_ptr,
    total_ptr,
    out_ptr,  # (B, Q, H, D)
    lse_ptr,  # (B, H, Q)
    scale,
    queries,
    heads,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    sample = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    query = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    valid = query < queries
    own = sample * queries
    asked = (query_ptr, (own + query) * query_stride + head * D, valid)
    peak, total, sums = attend_rows(
        *(asked, key_ptr, value_ptr, latent_stride, own, own + queries, head, scale),
        *(D, WIDTH, STEP, DTYPE, BLOCK_Q, BLOCK_K),
    )
    for chunk in range(tl.load(chunk_range_ptr + sample), tl.load(chunk_range_ptr + sample + 1)):
        row = (chunk * heads + head) * queries + query
        part_peak = tl.load(peak_ptr + row, mask=valid, other=0.0)
        part_total = tl.load(total_ptr + row, mask=valid, other=0.0)
        part = load_tile(partial_ptr, row * D, valid, 0, WIDTH, D, tl.float32)
        higher = tl.maximum(peak, part_peak)
        shrink, part_shrink = tl.exp(peak - higher), tl.exp(part_peak - higher)
        total = total * shrink + part_total * part_shrink
        sums = sums * shrink[:, None] + part * part_shrink[:, None]
        peak = higher
    store_tile(out_ptr, ((own + query) * heads + head) * D, valid, sums / total[:, None], D)
    tl.store(lse_ptr + (sample * heads + head) * queries + query, peak + tl.log(total), mask=valid)


def attend(
    query: Tensor, key_value: Tensor, offsets: list[int], key_value_latent: Tensor
) -> tuple[Tensor, Tensor]:
    """Attended values (B, Q, H, D) in the query's dtype and the logsumexp of the scores (B, H, Q) fp32.

    query             # (B, Q, H, D), any strides, as all of these
    key_value         # (T, 2, H, D), sample b owns rows offsets[b]:offsets[b + 1]
    key_value_latent  # (B, Q, 2, H, D)
    """
    batch, queries, heads, dim = query.shape
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=query.device)
    if out.numel() == 0:
        return out, lse
    chunks, ranges = chunk_table(offsets, chunk_keys(len(key_value), heads), query.device)
    partial = torch.empty(len(chunks), heads, queries, dim, dtype=torch.float32, device=query.device)
    peak, total = torch.empty(2, *partial.shape[:-1], dtype=torch.float32, device=query.device)
    q, latent = whole_rows(query), key_value_latent.flatten(0, 1)
    sizes = (dim**-0.5, queries, heads)
    if len(chunks):
        launch = constants("attend_chunk", queries, dim, query.dtype)
        attend_chunk_kernel[(len(chunks) * heads, triton.cdiv(queries, launch["BLOCK_Q"]))](
            q, q.stride(0), *halves(key_value), chunks, partial, peak, total, *sizes, **launch
        )
    launch = constants("attend_combine", queries, dim, query.dtype)
    attend_combine_kernel[(batch * heads, triton.cdiv(queries, launch["BLOCK_Q"]))](
        q, q.stride(0), *halves(latent), ranges, partial, peak, total, out, lse, *sizes, **launch
    )
    return out, lse
