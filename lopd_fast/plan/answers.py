"""Operations on the meta device that ask for numbers, where there are none.

A training step asks a few: which tokens are of this sequence, does a mask hide any, which rows count. Integer and
boolean tensors that came from the host, and what follows from them, therefore keep their numbers and answer as in a
real run. Of what nobody knows, such as the norm of a gradient, the answer is 1, true, or every row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten
MOST_KNOWN = 1 << 20  # elements of the largest tensor whose numbers are kept
_META = torch.device("meta")


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """One operation on the meta device, and on the numbers behind it where those are known."""
    packet = func.overloadpacket
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if _META not in (kwargs.get("device"), *(x.device for x in given)):
        return func(*args, **kwargs)
    known = all(_numbers(x) is not None for x in given)
    if packet is aten._local_scalar_dense:
        return func(_numbers(args[0])) if known else args[0].dtype == torch.bool or 1
    if packet is aten.equal:
        return func(*map(_numbers, args)) if known else True
    if packet is aten.nonzero:
        return _places(args[0])
    if packet is aten._to_copy and given[0].device == _META and kwargs.get("device", _META) != _META:
        source = _numbers(args[0])
        return func(torch.ones(args[0].shape, dtype=args[0].dtype) if source is None else source, **kwargs)
    if packet is aten.index:
        indices = [_as_places(index) for index in args[1]]
        args = args[0], [place for places in indices for place in places]
    result = func(*args, **kwargs)
    if func._schema.is_mutable:
        for tensor in _written(func, args, kwargs):
            tensor.untyped_storage().written = True  # pyright: ignore[reportAttributeAccessIssue]
    elif known and "empty" not in func._schema.name:
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        if all(_exact(x) and x.device == _META for x in made):
            args, kwargs = tree_map_only(Tensor, _numbers, (args, kwargs))
            if "device" in kwargs:
                kwargs = kwargs | {"device": torch.device("cpu")}
            numbers = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
            for tensor, known_numbers in zip(made, numbers, strict=True):
                tensor.numbers = known_numbers  # pyright: ignore[reportAttributeAccessIssue]
    return result


def _exact(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and tensor.numel() <= MOST_KNOWN


def _numbers(tensor: Tensor) -> Tensor | None:
    """What an integer or boolean tensor holds, if that is known; a view shares what is written to its base."""
    if tensor.device != _META:
        return tensor if _exact(tensor) else None
    written = getattr(tensor.untyped_storage(), "written", False)
    return None if written else getattr(tensor, "numbers", None)


def _places(mask: Tensor) -> Tensor:
    """Where a tensor is not 0, one place a row; everywhere if nobody knows."""
    numbers = _numbers(mask)
    if numbers is None:
        return torch.empty(mask.numel(), mask.dim(), dtype=torch.int64, device=_META)
    return _with_numbers(numbers.nonzero())


def _as_places(index: Tensor | None) -> list[Tensor | None]:
    """A mask that is used as an index, as one index for each of its dimensions."""
    if index is None or index.dtype != torch.bool:
        return [index]
    places = _places(index)
    numbers = _numbers(places)
    return list(places.unbind(1)) if numbers is None else [_with_numbers(x) for x in numbers.unbind(1)]


def _with_numbers(numbers: Tensor) -> Tensor:
    tensor = torch.empty_like(numbers, device=_META)
    tensor.numbers = numbers  # pyright: ignore[reportAttributeAccessIssue]
    return tensor


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operation writes to."""
    named = zip(func._schema.arguments, args, strict=False)
    values = [value for argument, value in named if argument.is_write]
    values += [kwargs.get(argument.name) for argument in func._schema.arguments if argument.is_write]
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]
