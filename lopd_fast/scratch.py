"""Scratch memory of the fused loss on a CPU, kept from one call to the next.

A chunk's logits are some hundred MiB that every call writes anew. From fresh memory each of their pages would be a
fault, which costs a call about a tenth of its time. A device's allocator keeps memory by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

HOSTS = ("cpu",)  # devices that count as a CPU
MOST_BYTES = 384 << 20  # kept; a call with a larger chunk takes and frees its own
_kept: list[Tensor] = []  # one (bytes,) uint8, or none while a call has it


def is_host(device: torch.device) -> bool:
    """Whether the loss goes the ways of a CPU."""
    return device.type in HOSTS


@contextmanager
def scratch(like: Tensor, *shapes: tuple[int, int]) -> Iterator[list[Tensor]]:
    """Uninitialised tensors of these shapes, of the dtype and on the device of `like`, for the time of the context."""
    sizes = [rows * columns for rows, columns in shapes]
    size = sum(sizes) * like.itemsize
    if type(like) is not Tensor or not is_host(like.device) or size > MOST_BYTES:
        yield [like.new_empty(shape) for shape in shapes]
        return
    try:
        memory = _kept.pop()  # no other thread gets it meanwhile
    except IndexError:
        memory = None
    if memory is None or len(memory) < size or memory.device != like.device:
        del memory
        memory = torch.empty(size, dtype=torch.uint8, device=like.device)
    try:
        parts = memory[:size].view(like.dtype).split(sizes)
        yield [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    finally:
        _kept[:] = [memory]


def release_scratch() -> None:
    """Frees what is kept; the next call takes it anew."""
    _kept.clear()
