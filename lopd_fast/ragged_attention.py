"""Attention of a few queries per sample over a ragged batch of long memories and over the queries' own latents.

    out_b = softmax(q_b [K_b ; K'_b]^T / sqrt(D)) [V_b ; V'_b]      K, V of the memory; K', V' of the latents

Every sample's rows of the packed memory are attended to by themselves, so nothing is padded. In backward, with the
probabilities P and dS = P * (dO V^T - rowsum(dO * O)),

    dq = dS K / sqrt(D)                        in the layer that asked
    dK = dS^T q / sqrt(D),   dV = P^T dO       summed over the queries of every layer that attended to the memory

`ragged_kernels` computes on CUDA, `ragged_torch` elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lopd_fast.kernel_backend import uses_kernels
from lopd_fast.ragged_torch import TorchMemory

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

        fp64, and heads too wide for a kernel, are torch's on any backend.
        Raises ValueError for offsets that do not run from 0 up to total_tokens, or a backend that cannot run.
        """
        offsets = checked_offsets(cu_seqlens, key_value.shape[0])
        _, _, heads, dim = key_value.shape
        self.batch = len(offsets) - 1
        self._query_shape = (self.batch, num_queries, heads, dim)
        self._uses_left = uses
        fits = key_value.dtype != torch.float64 and dim <= MAX_KERNEL_DIM
        if uses_kernels(backend, key_value.device) and fits:
            from lopd_fast.ragged_kernels import KernelMemory  # imports triton

            self.keys = KernelMemory(key_value, offsets, num_queries, uses)
        else:
            self.keys = TorchMemory(key_value, offsets, num_queries)

    def attend(self, query: Tensor, key_value_latent: Tensor) -> Tensor:
        """softmax(q [K ; K']^T / sqrt(D)) [V ; V'] of each sample, (B, num_queries, H, D) in the query's dtype.

        query             # (B, num_queries, H, D), any strides
        key_value_latent  # (B, num_queries, 2, H, D), any strides

        Scores and sums are fp32 (fp64 for fp64). Differentiable once.
        Raises ValueError for other shapes, or for more uses than the memory was made for.
        """
        batch, queries, heads, dim = self._query_shape
        latent_shape = (batch, queries, 2, heads, dim)
        if query.shape != self._query_shape or key_value_latent.shape != latent_shape:
            raise ValueError(
                f"This memory of {batch} samples needs queries {self._query_shape} and latents {latent_shape}, "
                f"got {tuple(query.shape)} and {tuple(key_value_latent.shape)}."
            )
        if not self._uses_left:
            raise ValueError("This memory has been attended to as often as it was made for: raise `uses`.")
        self._uses_left -= 1
        with torch.autocast(query.device.type, enabled=False):
            return self.keys.attend(query, key_value_latent)


def ragged_cross_attention(
    query: Tensor, key_value: Tensor, cu_seqlens: Tensor, key_value_latent: Tensor, *, backend: str = "auto"
) -> Tensor:
    """`RaggedMemory.attend` to a memory that is used once."""
    return RaggedMemory(key_value, cu_seqlens, query.shape[1], backend=backend).attend(
        query, key_value_latent
    )


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
