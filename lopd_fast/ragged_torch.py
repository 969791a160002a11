"""Plain torch for `ragged_attention`: a loop over the samples, so the work is that of the real tokens.

Scores lie key-major, (H, L, Q), so that no product needs the strided keys or values copied. Sums are fp32 (fp64 for
fp64), whatever the dtype of the inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

PIECE = 512  # keys whose scores are held at once: they stay in the cache


def attend(
    query: Tensor, key_value: Tensor, offsets: list[int], key_value_latent: Tensor
) -> tuple[Tensor, Tensor]:
    """Attended values (B, Q, H, D) in the query's dtype and the logsumexp of the scores (B, H, Q)."""
    q = _by_head(query) * query.shape[-1] ** -0.5  # (B, H, Q, D)
    key, value = _keys_and_values(key_value_latent)
    scores = key @ q.mT  # (B, H, Q, Q)
    highest = scores.amax(-2, keepdim=True)  # (B, H, 1, Q), as is total
    weights = scores.sub_(highest).exp_()
    total, attended = weights.sum(-2, keepdim=True), weights.mT @ value
    for b, rows in _pieces(offsets):
        key, value = _keys_and_values(key_value[rows])
        scores = key @ q[b].mT  # (H, L, Q)
        higher = torch.maximum(highest[b], scores.amax(-2, keepdim=True))
        shrink = (highest[b] - higher).exp_()
        weights = scores.sub_(higher).exp_()
        total[b].mul_(shrink).add_(weights.sum(-2, keepdim=True))
        attended[b].mul_(shrink.mT).add_(weights.mT @ value)
        highest[b] = higher
    out = (attended / total.mT).transpose(1, 2).to(query.dtype)
    return out, total.log_().add_(highest).squeeze(-2)


def attend_backward(
    query: Tensor,
    key_value: Tensor,
    offsets: list[int],
    key_value_latent: Tensor,
    d_out: Tensor,
    lse: Tensor,
    through_out: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gradients of query and key_value_latent, in their dtypes."""
    scale = query.shape[-1] ** -0.5
    q, d_out = _by_head(query) * scale, _by_head(d_out)
    lse, through_out = lse.unsqueeze(-2), through_out.unsqueeze(-2)  # (B, H, 1, Q)
    d_latent = torch.empty_like(key_value_latent, dtype=_wide_dtype(key_value_latent))
    d_key_latent, d_value_latent = _keys_and_values(d_latent)
    key, value = _keys_and_values(key_value_latent)
    weights, d_scores = _weights_and_gradient(key, value, q, d_out, lse, through_out)
    d_value_latent[:] = weights @ d_out
    d_key_latent[:] = d_scores @ q
    d_query = d_scores.mT @ key  # (B, H, Q, D)
    for b, rows in _pieces(offsets):
        key, value = _keys_and_values(key_value[rows])
        _, d_scores = _weights_and_gradient(key, value, q[b], d_out[b], lse[b], through_out[b])
        d_query[b] += d_scores.mT @ key
    return d_query.mul_(scale).transpose(1, 2).to(query.dtype), d_latent.to(key_value_latent.dtype)


def memory_gradient(
    query: Tensor,
    key_value: Tensor,
    offsets: list[int],
    d_out: Tensor,
    lse: Tensor,
    through_out: Tensor,
) -> Tensor:
    """Gradient of key_value (total_tokens, 2, H, D) from all M queries (B, M, H, D) that attended to it."""
    q, d_out = _by_head(query) * query.shape[-1] ** -0.5, _by_head(d_out)
    lse, through_out = lse.unsqueeze(-2), through_out.unsqueeze(-2)
    gradient = torch.empty_like(key_value, memory_format=torch.contiguous_format)
    for b, rows in _pieces(offsets):
        key, value = _keys_and_values(key_value[rows])
        weights, d_scores = _weights_and_gradient(key, value, q[b], d_out[b], lse[b], through_out[b])
        d_key, d_value = gradient[rows].transpose(0, 2).unbind(1)  # views (H, L, D)
        d_value[:] = weights @ d_out[b]
        d_key[:] = d_scores @ q[b]
    return gradient


def _weights_and_gradient(
    key: Tensor, value: Tensor, q: Tensor, d_out: Tensor, lse: Tensor, through_out: Tensor
) -> tuple[Tensor, Tensor]:
    """Probabilities P and the scores' gradient P * (dO V^T - through_out), both key-major (..., H, L, Q)."""
    weights = (key @ q.mT).sub_(lse).exp_()
    return weights, (value @ d_out.mT).sub_(through_out).mul_(weights)


def _keys_and_values(packed: Tensor) -> tuple[Tensor, Tensor]:
    """(..., rows, 2, H, D) -> keys and values (..., H, rows, D), views unless they have to be widened."""
    key, value = packed.to(_wide_dtype(packed)).transpose(-4, -2).unbind(-3)
    return key, value


def _by_head(x: Tensor) -> Tensor:
    """(B, rows, H, D) -> (B, H, rows, D), a view unless it has to be widened."""
    return x.to(_wide_dtype(x)).transpose(-3, -2)


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _pieces(offsets: list[int]) -> Iterator[tuple[int, slice]]:
    """Index of a sample and some PIECE of its rows, over all that have any memory."""
    for b, (start, end) in enumerate(pairwise(offsets)):
        for first in range(start, end, PIECE):
            yield b, slice(first, min(first + PIECE, end))
