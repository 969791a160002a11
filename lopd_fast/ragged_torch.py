"""Plain torch for `ragged_attention`: a loop over the samples, so the work is that of the real tokens.

Keys and values lie sample by sample and head by head, (2, H, L_b + num_queries, D), in one buffer: the last rows of a
sample are room for the latents' own, so that one product, one softmax and one product attend to both. The
probabilities of every layer are kept: on a CPU they cost less to keep than to compute anew, num_queries * H numbers a
token and layer, and without them backward is the four products that it must be.

The gradient has the keys' shape and is handed from the last layer to the first, each adding to it in place.
Sums are fp32 (fp64 for fp64), whatever the dtype of the inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class TorchMemory:
    """Keys and values of a ragged batch of memories, to be attended to by several layers."""

    def __init__(self, key_value: Tensor, offsets: list[int], num_queries: int) -> None:
        """key_value (total_tokens, 2, H, D), any strides; sample b owns rows offsets[b]:offsets[b + 1]."""
        self._packed = _Pack.apply(key_value, offsets, num_queries)  # type: ignore
        rows = [end - start + num_queries for start, end in pairwise(offsets)]
        self._samples = _by_sample(self._packed.detach(), rows, key_value)

    def attend(self, query: Tensor, key_value_latent: Tensor) -> Tensor:
        """query (B, Q, H, D) and key_value_latent (B, Q, 2, H, D) -> attended values, in the query's dtype."""
        out, self._packed = _Attend.apply(query, key_value_latent, self._packed, self._samples)  # type: ignore
        return out


class _Attend(torch.autograd.Function):
    """Attention of one layer, and the packed keys themselves, for the next."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, query: Tensor, latent: Tensor, packed: Tensor, samples: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        q = _by_head(query) * query.shape[-1] ** -0.5  # (B, H, Q, D)
        attended, kept = torch.empty_like(q), []
        with torch.autocast(query.device.type, enabled=False):
            for b, (key, value) in enumerate(_with_latents(samples, latent)):
                weights = torch.bmm(q[b], key.mT).softmax(-1)  # (H, Q, rows)
                torch.bmm(weights, value, out=attended[b])
                kept.append(weights)
        out = attended.transpose(1, 2).to(query.dtype).contiguous()
        ctx.save_for_backward(q, latent, out, *kept)
        ctx.samples, ctx.dtype = samples, query.dtype
        ctx.set_materialize_grads(False)
        return out, packed.view_as(packed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor | None, gradient: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if d_out is None:
            return None, None, gradient, None
        q, latent, out, *kept = ctx.saved_tensors
        queries = q.shape[-2]
        rows = [sample.shape[2] for sample in ctx.samples]
        total = gradient if gradient is not None else q.new_zeros(sum(x.numel() for x in ctx.samples))
        d_out, d_q, d_latent = _by_head(d_out), torch.empty_like(q), torch.empty_like(latent)
        through_out = (d_out * _by_head(out)).sum(-1, keepdim=True)  # (B, H, Q, 1)
        with torch.autocast(q.device.type, enabled=False):
            parts = zip(
                _with_latents(ctx.samples, latent), _by_sample(total, rows, latent), kept, strict=True
            )
            for b, ((key, value), d_sample, weights) in enumerate(parts):
                d_scores = torch.bmm(d_out[b], value.mT).sub_(through_out[b]).mul_(weights)
                torch.bmm(d_scores, key, out=d_q[b])
                d_key, d_value = d_sample
                d_key.baddbmm_(d_scores.mT, q[b])
                d_value.baddbmm_(weights.mT, d_out[b])
                own = d_sample[:, :, -queries:]  # of this layer's latents; the next layer has others
                d_latent[b] = own.permute(2, 0, 1, 3)
                own.zero_()
        return d_q.mul_(q.shape[-1] ** -0.5).transpose(1, 2).to(ctx.dtype), d_latent, total, None


class _Pack(torch.autograd.Function):
    """(total_tokens, 2, H, D) -> the samples one after the other, each (2, H, L_b + num_queries, D)."""

    @staticmethod
    def forward(ctx: Any, key_value: Tensor, offsets: list[int], num_queries: int) -> Tensor:  # type: ignore[override]
        lengths = [end - start for start, end in pairwise(offsets)]
        ctx.rows, ctx.queries = [length + num_queries for length in lengths], num_queries
        ctx.like = key_value.new_empty(0, *key_value.shape[1:])  # a view would keep the memory's own alive
        packed = torch.empty(
            sum(ctx.rows) * key_value[:1].shape[1:].numel(),
            dtype=_wide_dtype(key_value),
            device=key_value.device,
        )
        for sample, own in zip(
            _by_sample(packed, ctx.rows, key_value), key_value.split(lengths), strict=True
        ):
            sample[:, :, : len(own)] = own.permute(1, 2, 0, 3)
        return packed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        samples = _by_sample(gradient, ctx.rows, ctx.like)
        own = [sample[:, :, : -ctx.queries].permute(2, 0, 1, 3) for sample in samples]
        return torch.cat([ctx.like, *own]).to(ctx.like.dtype), None, None


def _with_latents(samples: list[Tensor], latent: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values (H, rows, D) of every sample, once a layer's latents (B, Q, 2, H, D) are written behind them."""
    for sample, own in zip(samples, latent, strict=True):
        sample[:, :, -len(own) :] = own.permute(1, 2, 0, 3)
        yield sample[0], sample[1]


def _by_sample(packed: Tensor, rows: list[int], like: Tensor) -> list[Tensor]:
    """Views (2, H, rows, D) of a packed buffer; `like` ends in (2, H, D)."""
    two, heads, dim = like.shape[-3:]
    parts = packed.split([count * two * heads * dim for count in rows])
    return [part.view(two, heads, count, dim) for part, count in zip(parts, rows, strict=True)]


def _by_head(x: Tensor) -> Tensor:
    """(B, rows, H, D) -> (B, H, rows, D), contiguous and widened."""
    return x.transpose(1, 2).to(_wide_dtype(x)).contiguous()


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
