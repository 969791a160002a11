"""Attention of a few queries per sample over a ragged batch of long memories and over the queries' own latents.

    out_b = softmax(q_b [K_b ; K'_b]^T / sqrt(D)) [V_b ; V'_b]      K, V of the memory; K', V' of the latents

Every sample's slice of the packed memory is attended to by itself, so the work is that of the real tokens and nothing
is padded. Backward recomputes the probabilities P from their logsumexp, with dS = P * (dO V^T - rowsum(dO * O)).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
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
    """The latents' own keys are one batched product; the memories are a loop. Both share one softmax normaliser.

    Scores lie key-major, (H, L, Q), so that no product needs the strided keys or values copied.
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
        with torch.autocast(query.device.type, enabled=False):
            q = _by_head(query) * query.shape[-1] ** -0.5  # (B, H, Q, D)
            latent_scores = _by_head(key_latent) @ q.mT  # (B, H, Q, Q)
            highest = latent_scores.amax(-2, keepdim=True)  # (B, H, 1, Q), as is total
            total, attended = torch.zeros_like(highest), torch.zeros_like(q)
            for b, rows in _segments(offsets):
                scores = _by_head(key_memory[rows]) @ q[b].mT  # (H, L, Q)
                torch.maximum(highest[b], scores.amax(1, keepdim=True), out=highest[b])
                weights = scores.sub_(highest[b]).exp_()
                total[b] = weights.sum(1, keepdim=True)
                attended[b] = weights.mT @ _by_head(value_memory[rows])
            weights = latent_scores.sub_(highest).exp_()
            total += weights.sum(-2, keepdim=True)
            attended += weights.mT @ _by_head(value_latent)
            out = (attended / total.mT).transpose(1, 2).to(query.dtype)
            lse = total.log_().add_(highest)
        ctx.save_for_backward(query, key_memory, value_memory, key_latent, value_latent, out, lse)
        ctx.offsets = offsets
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *inputs, out, lse = ctx.saved_tensors
        query, key_memory, value_memory, key_latent, value_latent = inputs
        grads = [torch.empty(x.shape, dtype=_wide_dtype(x), device=x.device) for x in inputs]
        d_query, d_key, d_value, d_key_latent, d_value_latent = (_by_head(grad) for grad in grads)
        scale = query.shape[-1] ** -0.5
        with torch.autocast(query.device.type, enabled=False):
            q, d_out = _by_head(query) * scale, _by_head(grad_out)
            through_out = (d_out * _by_head(out)).sum(-1).unsqueeze(-2)  # (B, H, 1, Q)

            def backpropagate(
                b: slice | int, key: Tensor, value: Tensor, d_key: Tensor, d_value: Tensor
            ) -> Tensor:
                """Writes the gradients of some keys and values, returns their share of the scaled query's."""
                weights = (key @ q[b].mT).sub_(lse[b]).exp_()
                torch.matmul(weights, d_out[b], out=d_value)
                d_scores = (value @ d_out[b].mT).sub_(through_out[b]).mul_(weights)
                torch.matmul(d_scores, q[b], out=d_key)
                return d_scores.mT @ key

            everyone = slice(None)
            d_query[:] = backpropagate(
                everyone, _by_head(key_latent), _by_head(value_latent), d_key_latent, d_value_latent
            )
            for b, rows in _segments(ctx.offsets):
                key, value = _by_head(key_memory[rows]), _by_head(value_memory[rows])
                d_query[b] += backpropagate(b, key, value, d_key[:, rows], d_value[:, rows])
            d_query *= scale
        d_query, d_key, d_value, d_key_latent, d_value_latent = (
            grad.to(x.dtype) for grad, x in zip(grads, inputs, strict=True)
        )
        return d_query, d_key, d_value, None, d_key_latent, d_value_latent


def _by_head(x: Tensor) -> Tensor:
    """(..., rows, H, D) -> (..., H, rows, D), a view unless it has to be widened."""
    return x.to(_wide_dtype(x)).transpose(-3, -2)


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _segments(offsets: list[int]) -> Iterator[tuple[int, slice]]:
    """Index and rows of every sample that has any memory."""
    return ((b, slice(*ends)) for b, ends in enumerate(pairwise(offsets)) if ends[0] < ends[1])


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
