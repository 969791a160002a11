"""Which calls of the loss run on the Triton kernels, and which module computes a call."""

from __future__ import annotations

from typing import Any

import torch

from lopd_fast import fused_tiles, loss_torch
from lopd_fast.kernel_backend import uses_kernels
from lopd_fast.loss_rows import LossOptions

MAX_SUPPORT = 127  # ids that a row of the kernels holds


def uses_triton(backend: str, device: torch.device, dtype: torch.dtype, support: int, split: bool) -> bool:
    """Whether a call takes the kernels; `split` says that its vocabulary is spread over processes.

    The kernels compute in fp32, on supports of up to 127 ids of a whole vocabulary. All other calls are computed by
    torch, whichever backend is named: the two agree.
    """
    kernels = uses_kernels(backend, device)
    return kernels and dtype == torch.float32 and 1 <= support <= MAX_SUPPORT and not split


def rows_of(options: LossOptions) -> Any:
    """The module that computes a call on two logits tensors: `loss_torch` or `loss_triton`."""
    if options.triton:
        from lopd_fast import loss_triton  # imports triton

        return loss_triton
    return loss_torch


def chunk_of(options: LossOptions) -> Any:
    """The class that computes a chunk of the fused loss."""
    return rows_of(options).Chunk if options.triton else fused_tiles.Chunk
