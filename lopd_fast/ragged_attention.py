"""Attention of a few queries per sample over a ragged batch of long memories and over the queries' own latents.

    out_b = softmax(q_b [K_b ; K'_b]^T / sqrt(D)) [V_b ; V'_b]      K, V of the memory; K', V' of the latents

Every sample's slice of the packed memory is attended to by itself, so the work is that of the real tokens and nothing
is padded. Backward recomputes the probabilities P from their logsumexp, with dS = P * (dO V^T - rowsum(dO * O)).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def ragged_cross_attention(
    query: Tensor,
    key_memory: Tensor,
    value_memory: Tensor,
    cu_seqlens: Tensor,
    key_latent: Tensor,
    value_latent: Tensor,
) -> Tensor:
    """softmax(q [K_memory ; K_latent]^T / sqrt(D)) [V_memory ; V_latent] for each sample of a ragged batch.

    query, key_latent, value_latent  # (B, Q, H, D), any strides
    key_memory, value_memory         # (total_tokens, H, D); sample b owns rows cu_seqlens[b]:cu_seqlens[b + 1]
    Returns (B, Q, H, D) in the query's dtype; scores and sums are fp32 (fp64 for fp64). Differentiable once.
    The backward pass recomputes the probabilities from their logsumexp (B, H, Q), so a layer keeps nothing of length L.
    Raises ValueError for offsets that do not run from 0 up to total_tokens, or that are not B + 1.
    """
    offsets = checked_offsets(cu_seqlens, key_memory.shape[0])
    if len(offsets) != query.shape[0] + 1:
        raise ValueError(
            f"cu_seqlens has {len(offsets)} entries for {query.shape[0]} samples: it needs one more than them."
        )
    return _RaggedCrossAttention.apply(query, key_memory, value_memory, offsets, key_latent, value_latent)  # type: ignore


class _RaggedCrossAttention(torch.autograd.Function):
    """Keys of memory and latents meet only in the score matrix, which is dim_head / Q times smaller than they are.

    Scores lie key-major, (H, L + Q, Q): both halves are written in place, and no product needs keys or values copied.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        query: Tensor,
        key_memory: Tensor,
        value_memory: Tensor,
        offsets: list[int],
        key_latent: Tensor,
        value_latent: Tensor,
    ) -> Tensor:
        batch, queries, heads, dim_head = query.shape
        out = query.new_empty(query.shape)
        lse = query.new_empty(batch, heads, 1, queries, dtype=_wide_dtype(query))
        with torch.autocast(query.device.type, enabled=False):
            for b, rows in enumerate(_segments(offsets)):
                q = _by_head(query[b]) * dim_head**-0.5
                weights = _products(_by_head(key_memory[rows]), _by_head(key_latent[b]), q)  # (H, L + Q, Q)
                highest = weights.amax(1, keepdim=True)
                weights.sub_(highest).exp_()
                total = weights.sum(1, keepdim=True)  # (H, 1, Q)
                of_memory, of_latent = weights.mT[..., :-queries], weights.mT[..., -queries:]
                attended = of_memory @ _by_head(value_memory[rows]) + of_latent @ _by_head(value_latent[b])
                out[b] = (attended / total.mT).transpose(0, 1)
                lse[b] = total.log_().add_(highest)
        ctx.save_for_backward(query, key_memory, value_memory, key_latent, value_latent, out, lse)
        ctx.offsets = offsets
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key_memory, value_memory, key_latent, value_latent, out, lse = ctx.saved_tensors
        queries, scale = query.shape[1], query.shape[-1] ** -0.5
        inputs = (query, key_memory, value_memory, key_latent, value_latent)
        grads = tuple(torch.empty(x.shape, dtype=_wide_dtype(x), device=x.device) for x in inputs)
        d_query, d_key, d_value, d_key_latent, d_value_latent = grads
        with torch.autocast(query.device.type, enabled=False):
            for b, rows in enumerate(_segments(ctx.offsets)):
                q, d_out = _by_head(query[b]) * scale, _by_head(grad_out[b])
                k, k_latent = _by_head(key_memory[rows]), _by_head(key_latent[b])
                p = _products(k, k_latent, q).sub_(lse[b]).exp_()  # (H, L + Q, Q), the probabilities
                torch.bmm(p[:, :-queries], d_out, out=_by_head(d_value[rows]))
                d_value_latent[b] = (p[:, -queries:] @ d_out).transpose(0, 1)
                d_score = _products(_by_head(value_memory[rows]), _by_head(value_latent[b]), d_out)
                d_score.sub_((d_out * _by_head(out[b])).sum(-1).unsqueeze(1)).mul_(p)
                of_memory, of_latent = d_score[:, :-queries], d_score[:, -queries:]
                torch.bmm(of_memory, q, out=_by_head(d_key[rows]))
                d_key_latent[b] = (of_latent @ q).transpose(0, 1)
                d_query[b] = ((of_memory.mT @ k + of_latent.mT @ k_latent) * scale).transpose(0, 1)
        d_query, d_key, d_value, d_key_latent, d_value_latent = (
            g.to(x.dtype) for g, x in zip(grads, inputs, strict=True)
        )
        return d_query, d_key, d_value, None, d_key_latent, d_value_latent


def _products(of_memory: Tensor, of_latent: Tensor, query: Tensor) -> Tensor:
    """[of_memory ; of_latent] query^T: (H, L, D), (H, Q, D) and (H, Q, D) -> (H, L + Q, Q)."""
    heads, length, _ = of_memory.shape
    queries = query.shape[1]
    products = query.new_empty(heads, length + queries, queries)
    torch.bmm(of_memory, query.mT, out=products[:, :length])
    products[:, length:] = of_latent @ query.mT
    return products


def _by_head(x: Tensor) -> Tensor:
    """(rows, H, D) -> (H, rows, D), a view unless it has to be widened."""
    return x.to(_wide_dtype(x)).transpose(0, 1)


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _segments(offsets: list[int]) -> Iterator[slice]:
    return (slice(start, end) for start, end in zip(offsets, offsets[1:], strict=False))


def checked_offsets(cu_seqlens: Tensor, total: int) -> list[int]:
    """cu_seqlens (B + 1,) as host integers. Raises ValueError unless they run from 0 up to `total` rows."""
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() == 0 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"cu_seqlens must be int32 of shape (B + 1,), got {tuple(cu_seqlens.shape)} of {cu_seqlens.dtype}."
        )
    offsets: list[int] = cu_seqlens.tolist()
    if offsets[0] != 0 or offsets[-1] != total or offsets != sorted(offsets):
        raise ValueError(
            f"cu_seqlens must start at 0, never decrease and end at the {total} memory tokens, "
            f"got {offsets if len(offsets) <= 8 else [*offsets[:4], '...', *offsets[-3:]]}."
        )
    return offsets
