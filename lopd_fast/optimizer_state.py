"""AdamW's state as flat named tensors, the form in which a checkpoint holds it."""

from collections.abc import Mapping

import torch
from torch import Tensor

from lopd_fast.errors import UserError

_ADAMW_STATE = {"step", "exp_avg", "exp_avg_sq"}


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """AdamW's state by the position of each parameter: "3.exp_avg", and "parameters", their number.

    The tensors are the optimizer's own, not copies. Learning rates and the like are the configuration's to set.
    """
    saved: dict[str, Tensor] = {"parameters": torch.tensor(len(_parameters(optimizer)))}
    for position, entries in optimizer.state_dict()["state"].items():
        saved |= {f"{position}.{name}": tensor for name, tensor in entries.items()}
    return saved


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Give `optimizer` the state that `optimizer_tensors` saved; the next step is then the same bit for bit.

    Raises:
        UserError: the state is of another number of parameters, of other shapes, or not AdamW's.
    """
    parameters = _parameters(optimizer)
    saved_count = int(tensors["parameters"]) if "parameters" in tensors else 0
    if saved_count != len(parameters):
        raise UserError(
            f"The saved optimizer has {saved_count} parameters and this run trains {len(parameters)}: "
            f"resume with the configuration that the checkpoint was made with."
        )
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        position, _, name = key.partition(".")
        if name:
            state.setdefault(int(position), {})[name] = tensor.clone()  # the optimizer updates it in place
    for position, entries in state.items():
        shape = parameters[position].shape
        if not _ADAMW_STATE <= entries.keys():
            raise UserError(
                f"The saved optimizer has {', '.join(sorted(entries))} where AdamW's state is expected."
            )
        for name, tensor in entries.items():
            if name != "step" and tensor.shape != shape:
                raise UserError(
                    f"The saved optimizer has {name} of shape {tuple(tensor.shape)} for parameter {position}, which is "
                    f"{tuple(shape)} in this run: resume with the configuration that the checkpoint was made with."
                )
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
