"""The account of what runs: memory by phase and part, FLOPs, and an estimate of the time.

`Ledger` sees every operation. It adds the storages that an operation makes and takes off those that die, so views,
in-place operations, autograd and recomputation come out as they are. On the meta device, whose tensors have shapes and
no data, a step of an 8B model is accounted for in seconds on any machine. Parts are told apart by naming storages.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lopd_fast.plan import answers

aten = torch.ops.aten
# Operations that read as much as they give, not their whole table.
_LOOKUPS = (aten.embedding, aten.index_select, aten.gather, aten.index)

# (FLOPs, dtype of the operands, bytes read and written) of one operation -> seconds
Speed = Callable[[float, torch.dtype, float], float]


@dataclass
class Phase:
    """The account of one phase."""

    parts: dict[str, float] = field(default_factory=dict)  # live bytes by part at the phase's highest moment
    flops: float = 0.0
    seconds: float = 0.0

    @property
    def peak(self) -> float:
        """Live bytes at the highest moment."""
        return sum(self.parts.values())


class Ledger(TorchDispatchMode):
    """While active, keeps the account of every operation on `device` under the phase entered last."""

    def __init__(self, device: torch.device, parts: Iterable[str], speed: Speed) -> None:
        """`parts` are the names that `name` may give; a storage that nobody names is of the first."""
        super().__init__()
        self.device, self.speed = device, speed
        self.live = dict.fromkeys(parts, 0)  # bytes by part
        self.phases: dict[str, Phase] = {}
        self.fresh_part: Callable[[Tensor], str] | None = None  # names what an operation makes
        self._run = answers.run if device.type == "meta" else lambda func, args, kwargs: func(*args, **kwargs)
        self._unnamed = next(iter(self.live))
        self._storages: dict[int, tuple[weakref.ref[Any], int, str]] = {}
        self._phase = Phase()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what happens inside towards `name`; phases do not nest."""
        outside, self._phase = self._phase, self.phases.setdefault(name, Phase())
        self._note_peak()
        yield
        self._phase = outside

    def name(self, tensors: Iterable[Tensor], part: str) -> None:
        """Count the storages of `tensors` under `part`."""
        for tensor in tensors:
            if tensor.device.type == self.device.type:
                storage = tensor.untyped_storage()
                self._add(storage, part)
                reference, size, before = self._storages[storage._cdata]
                self.live[before] -= size
                self.live[part] += size
                self._storages[storage._cdata] = (reference, size, part)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        result = self._run(func, args, kwargs)
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.device.type == self.device.type]
        owned = {x.untyped_storage()._cdata for x in given}
        fresh = False
        for tensor in made:
            storage = tensor.untyped_storage()
            if storage._cdata not in owned:
                fresh |= self._add(storage, self.fresh_part(tensor) if self.fresh_part else self._unnamed)
        if fresh:
            self._note_peak()
        if made and (fresh or func._schema.is_mutable) and "empty" not in func._schema.name:
            formula = flop_registry.get(func.overloadpacket)
            flops = formula(*args, **kwargs, out_val=result) if formula else 0
            touched = made if func.overloadpacket in _LOOKUPS else given + made
            moved = sum(x.numel() * x.element_size() for x in touched)
            self._phase.flops += flops
            self._phase.seconds += self.speed(flops, given[0].dtype if given else torch.float32, moved)
        return result

    def _add(self, storage: torch.UntypedStorage, part: str) -> bool:
        """Whether the storage is new."""
        key = storage._cdata
        if key in self._storages:
            return False

        def gone(_: Any) -> None:
            _, size, last = self._storages.pop(key)
            self.live[last] -= size

        size = storage.nbytes()
        self._storages[key] = (weakref.ref(storage, gone), size, part)
        self.live[part] += size
        return True

    def _note_peak(self) -> None:
        if sum(self.live.values()) >= self._phase.peak:
            self._phase.parts = dict(self.live)
