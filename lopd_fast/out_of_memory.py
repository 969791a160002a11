"""A device or a host without memory: how it is told, and the fused loss's word on it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_TEXTS = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
)  # of a RuntimeError: CUDA, CPU, Windows


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory had run out; a CPU's allocator says so by the text of a RuntimeError alone."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


@contextmanager
def chunk_sizes_told(rows: int, vocabulary: int, chunk: int) -> Iterator[None]:
    """Where memory runs out inside, the same kind of error with these sizes ahead of its own words."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        kinds = (torch.OutOfMemoryError, MemoryError)
        kind = next((kind for kind in kinds if isinstance(error, kind)), RuntimeError)
        raise kind(
            f"fused_linear_topk_tail_kl ran out of memory with {rows:,} rows, a vocabulary of {vocabulary:,} and "
            f"{chunk:,} rows to a chunk: give chunk_size, a smaller one. {error}"
        ) from error
