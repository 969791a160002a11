"""The state of AdamW, plain or 8-bit, as flat named tensors: the form in which a checkpoint holds it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lopd_fast.errors import UserError


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """AdamW's state by the position of each parameter: "3.exp_avg", and "parameters", their number.

    The tensors are the optimizer's own, not copies. Learning rates and the like are the configuration's to set.
    """
    parameters = _parameters(optimizer)
    saved: dict[str, Tensor] = {"parameters": torch.tensor(len(parameters))}
    for position, parameter in enumerate(parameters):
        for name, value in optimizer.state.get(parameter, {}).items():
            saved[f"{position}.{name}"] = value if isinstance(value, Tensor) else torch.tensor(value)
    return saved


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Give `optimizer` the state that `optimizer_tensors` saved; the next step is then the same bit for bit.

    Raises:
        UserError: the state is of another number of parameters, of other shapes, or of another kind of optimizer.
    """
    parameters = _parameters(optimizer)
    saved_count = int(tensors["parameters"]) if "parameters" in tensors else 0
    if saved_count != len(parameters):
        raise UserError(
            f"The saved optimizer has {saved_count} parameters and this run trains {len(parameters)}: "
            f"resume with the configuration that the checkpoint was made with."
        )
    saved: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        position, _, name = key.partition(".")
        if name:
            saved.setdefault(int(position), {})[name] = tensor
    state: dict[Tensor, dict[str, Any]] = {}
    for position, entries in saved.items():
        fresh = _fresh_state(optimizer, position)
        if entries.keys() != fresh.keys():
            raise UserError(
                f"The saved optimizer has {', '.join(sorted(entries))} where {type(optimizer).__name__}'s state is "
                f"expected, which has {', '.join(sorted(fresh))}: resume with the configuration that the checkpoint "
                "was made with."
            )
        for name, tensor in entries.items():
            own = fresh[name]
            if not isinstance(own, Tensor):
                fresh[name] = type(own)(tensor.item())
            elif (own.shape, own.dtype) == (tensor.shape, tensor.dtype):
                own.copy_(tensor)
            else:
                raise UserError(
                    f"The saved optimizer has {name} of shape {tuple(tensor.shape)} in {tensor.dtype} for parameter "
                    f"{position}, which has {tuple(own.shape)} in {own.dtype} in this run: resume with the "
                    "configuration that the checkpoint was made with."
                )
        state[parameters[position]] = fresh
    optimizer.state.clear()
    optimizer.state.update(state)


def _fresh_state(optimizer: torch.optim.Optimizer, position: int) -> dict[str, Any]:
    """The state of a parameter before its first step, in memory of its own and where the optimizer wants it."""
    groups = optimizer.param_groups
    number, place = [(i, j) for i, group in enumerate(groups) for j in range(len(group["params"]))][position]
    parameter = groups[number]["params"][place]
    if isinstance(optimizer, torch.optim.AdamW):
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.tensor(0.0), **moments}
    optimizer.state[parameter] = {}
    optimizer.init_state(groups[number], parameter, number, place)  # pyright: ignore
    return optimizer.state.pop(parameter)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
