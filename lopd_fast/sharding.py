"""FSDP2 (torch's fully_shard) for the models of a run: which weights a process keeps a part of, and whole ones of them.

backbone  its blocks, where model.shard asks for it; embeddings, head and every adapter stay whole on each process,
          the adapters' gradients being summed apart
student   in full mode, always: each block by itself, the rest (embeddings, last norm, head) as a root that is gathered
          from the forward on until the backward is over, for the fused loss reads the head's weight as it is
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from lopd_fast.errors import UserError


class Body(nn.Module):
    """A causal language model without the call of its head: the root that FSDP gathers the head's weight with."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        """What the model's decoder returns."""
        return self.model.get_decoder()(**inputs)


def shard_frozen(model: PreTrainedModel, size: int) -> None:
    """Shard the frozen weights of the blocks of `model` over `size` processes; what learns, and the rest, stays whole.

    Raises:
        UserError: the model does not say what its blocks are.
    """
    mesh = _mesh(model, size)
    for block in _blocks(model):
        learning = {parameter for name, parameter in block.named_parameters() if "lora_" in name}
        fully_shard(block, mesh=mesh, ignored_params=learning)
    body = model.get_decoder()
    rest = {parameter for parameter in body.parameters() if not isinstance(parameter, DTensor)}
    fully_shard(body, mesh=mesh, ignored_params=rest)  # no weights of its own: it lets blocks gather ahead


def shard_learning(model: PreTrainedModel, size: int) -> Body:
    """Shard every weight of `model` over `size` processes; their gradients are sums. Run it by the body returned."""
    mesh = _mesh(model, size)
    body = Body(model)
    for block in _blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(body, mesh=mesh, reshard_after_forward=False)
    for module in body.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # shares of one step's sum, not means of batches
            module.set_force_sum_reduction_for_comms(True)
    return body


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor of which each process holds a part; any other as it is. Every process must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_of(tensor: Tensor, like: Tensor) -> Tensor:
    """This process's part of the whole `tensor`, cut as `like` is; the tensor itself where `like` is whole."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def gathered(tensors: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Whole tensors, those that were in parts on the CPU; {} unless `keep`. Every process must ask."""
    found = {}
    for name, tensor in tensors.items():
        full = whole(tensor)
        if keep:
            found[name] = full if full is tensor else full.cpu()
    return found


def optimizer_parts(tensors: Mapping[str, Tensor], parameters: Sequence[Tensor]) -> dict[str, Tensor]:
    """An optimizer's saved state ("3.exp_avg": whole tensor) cut as its parameters are."""
    parts = {}
    for key, tensor in tensors.items():
        position, _, name = key.partition(".")
        like = parameters[int(position)] if name and int(position) < len(parameters) else tensor
        parts[key] = part_of(tensor, like) if tensor.shape == like.shape else tensor
    return parts


def _blocks(model: PreTrainedModel) -> list[nn.Module]:
    names = set(model._no_split_modules or ())
    blocks = [module for module in model.get_decoder().modules() if type(module).__name__ in names]
    if not blocks:
        raise UserError(
            f"{type(model).__name__} does not say what its blocks are (_no_split_modules), so it cannot be sharded: "
            "train a LoRA with model.shard=false."
        )
    return blocks


def _mesh(model: PreTrainedModel, size: int) -> DeviceMesh:
    return init_device_mesh(model.device.type, (size,))
