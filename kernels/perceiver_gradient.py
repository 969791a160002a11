"""Backward of the perceiver attention: gradients of queries and latents a layer, of the memory once for all layers.

    P = exp(q [K ; K']^T / sqrt(D) - lse),   dS = P * (dO [V ; V']^T - through_out),   through_out = rowsum(dO * out)
    dq = dS [K ; K'] / sqrt(D),   d[K ; K'] = dS^T q / sqrt(D),   d[V ; V'] = P^T dO

Shapes as in perceiver_attention.py; dO (B, Q, H, D), lse and through_out (B, H, Q) fp32.

attend_backward: a program a chunk leaves its share of dq, one a sample adds the shares in order and does the latents.
memory_gradient: a program a block of keys goes over all queries that attended to it, those of several layers side by
side, so dK and dV are written once. Every number is written by one program, in one order: no atomics.
"""

# A type checker takes a kernel for the plain function under @triton.jit.
# pyright: reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

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


def bytes_moved(
    tokens: int, samples: int, queries: int, heads: int, dim: int, itemsize: int
) -> dict[str, int]:
    """Each pass: keys and values of the memory read once, their gradients written once; partial sums left out."""
    memory, rows = 2 * tokens * heads * dim * itemsize, samples * queries * heads * dim * itemsize
    return {"attend_backward": memory + 8 * rows, "memory_gradient": 2 * memory + 2 * rows}


def flops(tokens: int, samples: int, queries: int, heads: int, dim: int) -> dict[str, int]:
    """Three products of every query and key of the memory, seven of the latents; four for the memory's gradient."""
    memory, latent = 2 * tokens * queries * heads * dim, 2 * samples * queries**2 * heads * dim
    return {"attend_backward": 3 * memory + 7 * latent, "memory_gradient": 4 * memory}


@triton.jit
def query_gradient(
    asked,  # pointer, int64 offsets of rows and validity of some queries
    d_outs,  # the same of their dO
    lse,  # (BLOCK_Q, 1)
    through_out,
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
    """dS K  # (BLOCK_Q, WIDTH) over the keys of rows start:end."""
    sums = tl.zeros((BLOCK_Q, WIDTH), tl.float32)
    for first in range(start, end, BLOCK_K):
        key = (first + tl.arange(0, BLOCK_K)).to(tl.int64)  # the interpreter counts in 32 bits
        here = key < end
        key_row = key * stride + head * D
        weights = tl.exp(inner(asked, (key_ptr, key_row, here), D, STEP, DTYPE) * scale - lse)
        d_weights = inner(d_outs, (value_ptr, key_row, here), D, STEP, DTYPE)
        d_scores = tl.where(here[None, :], weights * (d_weights - through_out), 0.0)
        sums = add_weighted(sums, d_scores, load_tile(key_ptr, key_row, here, 0, WIDTH, D, DTYPE))
    return sums


@triton.jit
def key_gradient(
    keys,  # pointer, int64 offsets of rows and validity of some keys
    values,
    query_ptr,
    query_stride,
    d_out_ptr,
    d_out_stride,
    lse_ptr,
    through_out_ptr,
    sample,
    head,
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
    """dK and dV  # (BLOCK_K, WIDTH) from all queries of the sample."""
    d_key = tl.zeros((BLOCK_K, WIDTH), tl.float32)
    d_value = tl.zeros((BLOCK_K, WIDTH), tl.float32)
    for first in range(0, queries, BLOCK_Q):
        query = first + tl.arange(0, BLOCK_Q)
        here = query < queries
        query_row = (sample * queries + query) * query_stride + head * D
        d_out_row = (sample * queries + query) * d_out_stride + head * D
        stats = (sample * heads + head) * queries + query
        lse = tl.load(lse_ptr + stats, mask=here, other=0.0)[:, None]
        through_out = tl.load(through_out_ptr + stats, mask=here, other=0.0)[:, None]
        weights = tl.exp(inner((query_ptr, query_row, here), keys, D, STEP, DTYPE) * scale - lse)
        d_weights = inner((d_out_ptr, d_out_row, here), values, D, STEP, DTYPE)
        d_scores = weights * (d_weights - through_out)
        d_out = load_tile(d_out_ptr, d_out_row, here, 0, WIDTH, D, DTYPE)
        d_value = add_weighted(d_value, tl.trans(weights), d_out)
        q = load_tile(query_ptr, query_row, here, 0, WIDTH, D, DTYPE)
        d_key = add_weighted(d_key, tl.trans(d_scores), q)
    return d_key * scale, d_value


@triton.jit
def query_gradient_chunk_kernel(
    query_ptr,
    query_stride,  # of a row of (B * Q)
    d_out_ptr,
    d_out_stride,
    lse_ptr,
    through_out_ptr,
    key_ptr,
    value_ptr,
    memory_stride,  # of a token
    chunk_ptr,  # (chunks, 3) int64: sample, first and last row
    partial_ptr,  # (chunks, H, Q, D) fp32
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
    row = sample * queries + query
    asked = (query_ptr, row * query_stride + head * D, valid)
    d_outs = (d_out_ptr, row * d_out_stride + head * D, valid)
    stats = (sample * heads + head) * queries + query
    lse = tl.load(lse_ptr + stats, mask=valid, other=0.0)[:, None]
    through_out = tl.load(through_out_ptr + stats, mask=valid, other=0.0)[:, None]
    sums = query_gradient(
        *(asked, d_outs, lse, through_out, key_ptr, value_ptr, memory_stride, start, end, head, scale),
        *(D, WIDTH, STEP, DTYPE, BLOCK_Q, BLOCK_K),
    )
    row = (chunk * heads + head) * queries + query
    store_tile(partial_ptr, row * D, valid, sums, D)


@triton.jit
def latent_gradient_kernel(
    query_ptr,
    query_stride,
    d_out_ptr,
    d_out_stride,
    lse_ptr,
    through_out_ptr,
    key_ptr,  # of the latents
    value_ptr,
    latent_stride,
    chunk_range_ptr,  # (B + 1,) int64: a sample's chunks
    partial_ptr,
    d_query_ptr,  # (B, Q, H, D)
    d_key_ptr,
    d_value_ptr,
    d_latent_stride,
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
    """A block of latents: dK' and dV' of its keys, then dq of its queries, the chunks' shares included."""
    sample = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    latent = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    valid = latent < queries
    own = sample * queries
    row = own + latent
    key_row = row * latent_stride + head * D
    d_key, d_value = key_gradient(
        *((key_ptr, key_row, valid), (value_ptr, key_row, valid), query_ptr, query_stride),
        *(d_out_ptr, d_out_stride, lse_ptr, through_out_ptr, sample, head, scale, queries, heads),
        *(D, WIDTH, STEP, DTYPE, BLOCK_Q, BLOCK_K),
    )
    store_tile(d_key_ptr, row * d_latent_stride + head * D, valid, d_key, D)
    store_tile(d_value_ptr, row * d_latent_stride + head * D, valid, d_value, D)

    asked = (query_ptr, row * query_stride + head * D, valid)
    d_outs = (d_out_ptr, row * d_out_stride + head * D, valid)
    stats = (sample * heads + head) * queries + latent
    lse = tl.load(lse_ptr + stats, mask=valid, other=0.0)[:, None]
    through_out = tl.load(through_out_ptr + stats, mask=valid, other=0.0)[:, None]
    sums = query_gradient(
        *(asked, d_outs, lse, through_out, key_ptr, value_ptr, latent_stride, own, own + queries),
        *(head, scale, D, WIDTH, STEP, DTYPE, BLOCK_Q, BLOCK_K),
    )
    for chunk in range(tl.load(chunk_range_ptr + sample), tl.load(chunk_range_ptr + sample + 1)):
        part = ((chunk * heads + head) * queries + latent) * D
        sums += load_tile(partial_ptr, part, valid, 0, WIDTH, D, tl.float32)
    store_tile(d_query_ptr, (row * heads + head) * D, valid, sums * scale, D)


@triton.jit
def memory_gradient_kernel(
    query_ptr,
    query_stride,
    d_out_ptr,
    d_out_stride,
    lse_ptr,
    through_out_ptr,
    key_ptr,
    value_ptr,
    memory_stride,
    chunk_ptr,  # chunks of at most BLOCK_K keys
    d_key_ptr,
    d_value_ptr,
    d_memory_stride,
    scale,
    queries,  # of all layers
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
    sample = tl.load(chunk_ptr + 3 * chunk)
    key = tl.load(chunk_ptr + 3 * chunk + 1) + tl.arange(0, BLOCK_K)
    valid = key < tl.load(chunk_ptr + 3 * chunk + 2)
    key_row = key * memory_stride + head * D
    d_key, d_value = key_gradient(
        *((key_ptr, key_row, valid), (value_ptr, key_row, valid), query_ptr, query_stride),
        *(d_out_ptr, d_out_stride, lse_ptr, through_out_ptr, sample, head, scale, queries, heads),
        *(D, WIDTH, STEP, DTYPE, BLOCK_Q, BLOCK_K),
    )
    store_tile(d_key_ptr, key * d_memory_stride + head * D, valid, d_key, D)
    store_tile(d_value_ptr, key * d_memory_stride + head * D, valid, d_value, D)


def attend_backward(
    query: Tensor,
    key_value: Tensor,
    offsets: list[int],
    key_value_latent: Tensor,
    d_out: Tensor,
    lse: Tensor,
    through_out: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gradients of query (B, Q, H, D) and key_value_latent (B, Q, 2, H, D), in their dtypes."""
    batch, queries, heads, dim = query.shape
    d_query = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    d_latent = torch.empty(key_value_latent.shape, dtype=key_value_latent.dtype, device=query.device)
    if d_query.numel() == 0:
        return d_query, d_latent
    chunks, ranges = chunk_table(offsets, chunk_keys(len(key_value), heads), query.device)
    partial = torch.empty(len(chunks), heads, queries, dim, dtype=torch.float32, device=query.device)
    asked, sizes = _asked(query, d_out, lse, through_out), (dim**-0.5, queries, heads)
    if len(chunks):
        launch = constants("query_gradient_chunk", queries, dim, query.dtype)
        query_gradient_chunk_kernel[(len(chunks) * heads, triton.cdiv(queries, launch["BLOCK_Q"]))](
            *asked, *halves(key_value), chunks, partial, *sizes, **launch
        )
    launch = constants("latent_gradient", queries, dim, query.dtype)
    latent, d_rows = halves(key_value_latent.flatten(0, 1)), halves(d_latent.flatten(0, 1))
    latent_gradient_kernel[(batch * heads, triton.cdiv(queries, launch["BLOCK_Q"]))](
        *asked, *latent, ranges, partial, d_query, *d_rows, *sizes, **launch
    )
    return d_query, d_latent


def memory_gradient(
    query: Tensor, key_value: Tensor, offsets: list[int], d_out: Tensor, lse: Tensor, through_out: Tensor
) -> Tensor:
    """Gradient of key_value (T, 2, H, D), in its dtype, from all M queries (B, M, H, D) that attended to it."""
    _, queries, heads, dim = query.shape
    gradient = torch.empty(key_value.shape, dtype=key_value.dtype, device=query.device)
    launch = constants("memory_gradient", queries, dim, query.dtype)
    chunks, _ = chunk_table(offsets, launch["BLOCK_K"], query.device)
    if len(chunks):
        asked, sizes = _asked(query, d_out, lse, through_out), (dim**-0.5, queries, heads)
        memory_gradient_kernel[(len(chunks) * heads,)](
            *asked, *halves(key_value), chunks, *halves(gradient), *sizes, **launch
        )
    return gradient


def _asked(query: Tensor, d_out: Tensor, lse: Tensor, through_out: Tensor) -> tuple:
    """The first six arguments of the kernels here."""
    query, d_out = whole_rows(query), whole_rows(d_out)
    return query, query.stride(0), d_out, d_out.stride(0), lse.contiguous(), through_out.contiguous()
