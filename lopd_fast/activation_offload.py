"""Checkpointed activations in host memory between a forward pass and its backward.

Copies in both directions are queued on the stream that computes, so they are exact and never raced; the host does not
wait for them. What is kept is each block's input, T x H, once per block and role.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lopd_fast.errors import UserError

LEAST_BYTES = 1 << 20  # a smaller tensor is not worth its transfer

Kept = Tensor | Callable[[], Tensor]


def check_offload(device: torch.device, gradient_checkpointing: bool) -> None:
    """Raises UserError where offloading makes no sense."""
    if device.type == "cpu":
        raise UserError(
            "model.activation_offload=true moves activations from a GPU to the CPU, and this run is on a CPU; leave it "
            "out, or set model.gradient_checkpointing=true alone to save memory."
        )
    if not gradient_checkpointing:
        raise UserError(
            "model.activation_offload=true keeps checkpoints in host memory; set model.gradient_checkpointing=true too."
        )


def to_host(x: Tensor) -> Callable[[], Tensor]:
    """Copies x to host memory; the result gives it back on its device."""
    device = x.device  # by itself: x must not live on in the closure
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
    host.copy_(x, non_blocking=True)
    return lambda: host.to(device, non_blocking=True, copy=True)


def offloaded() -> saved_tensors_hooks:
    """A context whose large saved activations wait in host memory; parameters and what needs no gradient stay."""

    def pack(x: Tensor) -> Kept:
        moves = x.requires_grad and not isinstance(x, nn.Parameter) and x.nbytes >= LEAST_BYTES
        return to_host(x.detach()) if moves else x

    def unpack(kept: Any) -> Tensor:
        return kept if isinstance(kept, Tensor) else kept()

    return saved_tensors_hooks(pack, unpack)
