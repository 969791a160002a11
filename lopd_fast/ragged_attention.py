"""Attention of a few queries per sample over a ragged batch of long memories and over the queries' own latents.

    out_b = softmax(q_b [K_b ; K'_b]^T / sqrt(D)) [V_b ; V'_b]      K, V of the memory; K', V' of the latents

Every sample's rows of the packed memory are attended to by themselves, so nothing is padded. Backward recomputes the
probabilities P from their logsumexp, so nothing as long as the memory is kept. With dS = P * (dO V^T - rowsum(dO * O)),

    dq = dS K / sqrt(D)                        in the layer that asked
    dK = dS^T q / sqrt(D),   dV = P^T dO       summed over the queries of every layer that attended to the memory

and that sum is one product with the queries of all layers side by side. For it a layer hands its q, dO, lse and
rowsum(dO * O) to the memory through autograd, as the gradients of four empty tensors that tie it to the memory.

`lopd_fast.kernels.perceiver_attention` computes on CUDA, `ragged_torch` elsewhere; the two offer the same functions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lopd_fast import ragged_torch
from lopd_fast.kernel_backend import uses_kernels

MAX_KERNEL_DIM = 256  # wider heads are left to torch


class RaggedMemory:
    """Keys and values of a ragged batch of memories, attended to `uses` times and given their gradient once."""

    def __init__(
        self,
        key_value: Tensor,
        cu_seqlens: Tensor,
        num_queries: int,
        uses: int = 1,
        *,
        backend: str = "auto",
    ) -> None:
        """
        key_value   # (total_tokens, 2, H, D), any strides; sample b owns rows cu_seqlens[b]:cu_seqlens[b + 1]
        cu_seqlens  # (B + 1,) int32 or int64, read on the host

        Raises ValueError for offsets that do not run from 0 up to total_tokens, or a backend that cannot run.
        """
        self.offsets = checked_offsets(cu_seqlens, key_value.shape[0])
        self.ops = _operations(backend, key_value)
        self.key_value = key_value.detach()
        _, _, heads, dim = key_value.shape
        self.query_shape = (len(self.offsets) - 1, num_queries, heads, dim)
        ties = _Ties.apply(key_value, self, uses)
        self._ties = [ties[use : use + 4] for use in range(0, 4 * uses, 4)]

    def attend(self, query: Tensor, key_value_latent: Tensor) -> Tensor:
        """softmax(q [K ; K']^T / sqrt(D)) [V ; V'] of each sample, (B, num_queries, H, D) in the query's dtype.

        query             # (B, num_queries, H, D), any strides
        key_value_latent  # (B, num_queries, 2, H, D), any strides

        Scores and sums are fp32 (fp64 for fp64). Differentiable once.
        Raises ValueError for other shapes, or for more uses than the memory was made for.
        """
        batch, queries, heads, dim = self.query_shape
        latent_shape = (batch, queries, 2, heads, dim)
        if query.shape != self.query_shape or key_value_latent.shape != latent_shape:
            raise ValueError(
                f"This memory of {batch} samples needs queries {self.query_shape} and latents {latent_shape}, "
                f"got {tuple(query.shape)} and {tuple(key_value_latent.shape)}."
            )
        if not self._ties:
            raise ValueError("This memory has been attended to as often as it was made for: raise `uses`.")
        return _Attend.apply(query, key_value_latent, self, *self._ties.pop(0))  # type: ignore


def ragged_cross_attention(
    query: Tensor, key_value: Tensor, cu_seqlens: Tensor, key_value_latent: Tensor, *, backend: str = "auto"
) -> Tensor:
    """`RaggedMemory.attend` to a memory that is used once."""
    return RaggedMemory(key_value, cu_seqlens, query.shape[1], backend=backend).attend(
        query, key_value_latent
    )


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, latent: Tensor, memory: RaggedMemory, *ties: Tensor) -> Tensor:  # type: ignore[override]
        with torch.autocast(query.device.type, enabled=False):
            out, lse = memory.ops.attend(query, memory.key_value, memory.offsets, latent)
        ctx.save_for_backward(query, memory.key_value, latent, out, lse)
        ctx.ops, ctx.offsets = memory.ops, memory.offsets
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key_value, latent, out, lse = ctx.saved_tensors
        with torch.autocast(query.device.type, enabled=False):
            through_out = (d_out.to(lse.dtype) * out).sum(-1).transpose(1, 2)  # (B, H, Q)
            d_query, d_latent = ctx.ops.attend_backward(
                query, key_value, ctx.offsets, latent, d_out, lse, through_out
            )
        return d_query, d_latent, None, query, d_out, lse, through_out


class _Ties(torch.autograd.Function):
    """Four empty tensors a use, shaped as what that use will hand back: q, dO, lse, rowsum(dO * O)."""

    @staticmethod
    def forward(ctx: Any, key_value: Tensor, memory: RaggedMemory, uses: int) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.save_for_backward(memory.key_value)
        ctx.ops, ctx.offsets = memory.ops, memory.offsets
        ctx.set_materialize_grads(False)
        batch, queries, heads, _ = memory.query_shape
        row = key_value.new_zeros(()).expand(memory.query_shape)
        number = row.new_zeros((), dtype=_wide_dtype(key_value)).expand(batch, heads, queries)
        return tuple(x.view_as(x) for _ in range(uses) for x in (row, row, number, number))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *parts: Tensor | None) -> tuple[Tensor | None, None, None]:  # type: ignore[override]
        (key_value,) = ctx.saved_tensors
        used = [parts[use : use + 4] for use in range(0, len(parts), 4) if parts[use] is not None]
        if not used:
            return None, None, None
        queries, d_outs, lses, throughs = zip(*used, strict=True)
        query, d_out = torch.cat(queries, dim=1), torch.cat(d_outs, dim=1)  # (B, uses * Q, H, D)
        lse, through_out = torch.cat(lses, dim=2), torch.cat(throughs, dim=2)  # (B, H, uses * Q)
        with torch.autocast(key_value.device.type, enabled=False):
            gradient = ctx.ops.memory_gradient(query, key_value, ctx.offsets, d_out, lse, through_out)
        return gradient, None, None


def _operations(backend: str, key_value: Tensor) -> Any:
    """The module that computes: fp64, and heads too wide for a kernel, are torch's on any backend."""
    if (
        uses_kernels(backend, key_value.device)
        and key_value.dtype != torch.float64
        and key_value.shape[-1] <= MAX_KERNEL_DIM
    ):
        from lopd_fast.kernels import perceiver_attention  # imports triton

        return perceiver_attention
    return ragged_torch


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


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
