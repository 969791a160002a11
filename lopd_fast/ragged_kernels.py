"""The Triton kernels of `ragged_attention`, in autograd.

Backward computes the probabilities anew from their logsumexp, so nothing as long as the memory is kept, and the
memory's gradient is one pass over the queries of all layers side by side. For it a layer hands its q, dO, lse and
rowsum(dO * O) to the memory through autograd, as the gradients of four empty tensors that tie it to the memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lopd_fast.kernels import perceiver_attention as kernels


class KernelMemory:
    """Keys and values of a ragged batch of memories, to be attended to by `uses` layers."""

    def __init__(self, key_value: Tensor, offsets: list[int], num_queries: int, uses: int) -> None:
        """key_value (total_tokens, 2, H, D), any strides; sample b owns rows offsets[b]:offsets[b + 1]."""
        self._key_value, self._offsets = key_value.detach(), offsets
        ties = _Ties.apply(key_value, offsets, num_queries, uses)
        self._ties = [ties[use : use + 4] for use in range(0, 4 * uses, 4)]

    def attend(self, query: Tensor, key_value_latent: Tensor) -> Tensor:
        """query (B, Q, H, D) and key_value_latent (B, Q, 2, H, D) -> attended values, in the query's dtype."""
        return _Attend.apply(  # type: ignore
            query, key_value_latent, self._key_value, self._offsets, *self._ties.pop(0)
        )


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, query: Tensor, latent: Tensor, key_value: Tensor, offsets: list[int], *ties: Tensor
    ) -> Tensor:
        out, lse = kernels.attend(query, key_value, offsets, latent)
        ctx.save_for_backward(query, key_value, latent, out, lse)
        ctx.offsets = offsets
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key_value, latent, out, lse = ctx.saved_tensors
        through_out = (d_out.float() * out).sum(-1).transpose(1, 2)  # (B, H, Q)
        d_query, d_latent = kernels.attend_backward(
            query, key_value, ctx.offsets, latent, d_out, lse, through_out
        )
        return d_query, d_latent, None, None, query, d_out, lse, through_out


class _Ties(torch.autograd.Function):
    """Four empty tensors a use, shaped as what that use will hand back: q, dO, lse, rowsum(dO * O)."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, key_value: Tensor, offsets: list[int], num_queries: int, uses: int
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(key_value)
        ctx.offsets = offsets
        ctx.set_materialize_grads(False)
        batch, (_, _, heads, dim) = len(offsets) - 1, key_value.shape
        row = key_value.new_zeros(()).expand(batch, num_queries, heads, dim)
        number = row.new_zeros((), dtype=torch.float32).expand(batch, heads, num_queries)
        return tuple(x.view_as(x) for _ in range(uses) for x in (row, row, number, number))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *parts: Tensor | None) -> tuple[Tensor | None, None, None, None]:  # type: ignore[override]
        (key_value,) = ctx.saved_tensors
        used = [parts[use : use + 4] for use in range(0, len(parts), 4) if parts[use] is not None]
        if not used:
            return None, None, None, None
        queries, d_outs, lses, throughs = zip(*used, strict=True)
        query, d_out = torch.cat(queries, dim=1), torch.cat(d_outs, dim=1)  # (B, uses * Q, H, D)
        lse, through_out = torch.cat(lses, dim=2), torch.cat(throughs, dim=2)  # (B, H, uses * Q)
        gradient = kernels.memory_gradient(query, key_value, ctx.offsets, d_out, lse, through_out)
        return gradient, None, None, None
