"""Whether a call runs on the Triton kernels."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def uses_kernels(backend: str, device: torch.device) -> bool:
    """backend "torch": no; "triton": yes, on CUDA or in Triton's interpreter; "auto": on CUDA where triton is there.

    Raises ValueError for another backend, or for "triton" where it cannot run.
    """
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(f"backend must be 'auto', 'torch' or 'triton', not {backend!r}")
    if backend == "torch":
        return False
    interpreted = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on")
    if backend == "auto":
        return device.type == "cuda" and not interpreted and _has_triton()
    if not _has_triton():
        raise ValueError("backend='triton' needs the package triton: install it, or use backend='torch'")
    if device.type != "cuda" and not interpreted:
        raise ValueError(f"backend='triton' needs CUDA tensors, not {device.type} ones: use backend='torch'")
    return True
