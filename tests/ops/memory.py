"""Records the largest tensor that any operation makes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lopd_fast.scratch import release_scratch


class LargestTensor(TorchDispatchMode):
    """While active, `bytes` is the size of the largest storage that an operation returned and did not get.

    ignore  # (rows, columns, dtype) of tensors to leave out, such as the gradients themselves; `ignored` says if any
              were made.
    """

    def __init__(self, ignore: tuple[int, int, torch.dtype] | None = None) -> None:
        super().__init__()
        release_scratch()  # what an earlier call left would not be seen
        self.bytes = 0
        self.ignore = ignore
        self.ignored: set[tuple[Any, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            x.untyped_storage()._cdata for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if not isinstance(x, Tensor) or x.untyped_storage()._cdata in given:
                continue
            if self.ignore is not None and (*x.shape, x.dtype) == self.ignore:
                self.ignored.add(self.ignore)
                continue
            self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return result
