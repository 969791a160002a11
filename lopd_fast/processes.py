"""The processes of a run on one node, as torchrun and accelerate launch them, and what they tell each other."""

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor

from lopd_fast.errors import UserError

PATIENCE = timedelta(hours=6)  # one process may still sample its longest rollout while the others wait
_store: Any = None  # the launcher's key-value store, once the processes have met


@dataclass(frozen=True)
class World:
    """This process among all of the run's; by default it is the only one, and nothing here does anything.

    Every method but `share` is to be called by all processes, in the same order.
    """

    rank: int = 0
    size: int = 1
    launched: bool = False  # by torchrun or accelerate, be it as the only one
    device: torch.device = torch.device("cpu")  # where tensors must be to travel

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and talks."""
        return self.rank == 0

    def share(self, lengths: Sequence[int]) -> list[int]:
        """Positions of this process's part of items of `lengths`, which are cut, in order, into about equal runs."""
        total, before, own = sum(lengths) or 1, 0, []
        for position, length in enumerate(lengths):
            middle = before + length / 2
            if self.size == 1 or min(int(middle * self.size / total), self.size - 1) == self.rank:
                own.append(position)
            before += length
        return own

    def sum(self, tensor: Tensor) -> Tensor:
        """`tensor`, in place, summed over the processes; every one gets the same bits."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def most(self, count: int) -> int:
        """The largest of the processes' counts."""
        if self.size == 1:
            return count
        found = torch.tensor(count, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def any(self, flag: bool) -> bool:
        """Whether any process says so."""
        return bool(self.most(int(flag)))

    def wait(self) -> None:
        """Until every process is here."""
        self.most(0)

    def gather(self, own: Any) -> list[Any]:
        """What each process hands in, by rank, as JSON brings it back: nothing that travels is ever executed."""
        if self.size == 1:
            return [own]
        data = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8).to(self.device)
        sizes = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        sizes[self.rank] = len(data)
        counts = self.sum(sizes).tolist()
        padded = data.new_zeros(max(counts))
        padded[: len(data)] = data
        found = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(found, padded)
        return [
            json.loads(part[:count].cpu().numpy().tobytes())
            for part, count in zip(found, counts, strict=True)
        ]

    def spread(self, tensor: Tensor, source: int = 0) -> Tensor:
        """The `tensor` of process `source`, in place, on every process."""
        if self.size > 1:
            moved = tensor.detach().to(self.device)
            dist.broadcast(moved, source)
            tensor.detach().copy_(moved)
        return tensor

    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Sum the gradients of the parameters that are whole on every process; FSDP sums those of the others itself.

        A parameter that no process has a gradient of keeps none.
        """
        parameters = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
        if self.size == 1 or not parameters:
            return
        present = torch.tensor([parameter.grad is not None for parameter in parameters], device=self.device)
        present = present.int()
        dist.all_reduce(present, dist.ReduceOp.MAX)
        for parameter, wanted in zip(parameters, present.tolist(), strict=True):
            if wanted:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)


def start(device: str = "auto") -> World:
    """Meet the other processes of this run, and take the GPU that is this one's; alone where nothing launched it.

    Raises:
        UserError: there are more processes than GPUs, all were given one GPU, or torch cannot connect them.
    """
    global _store
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return World()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local, beside = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", size))
    place = (
        torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if device == "auto"
        else torch.device(device)
    )
    if place.type == "cuda":
        if place.index is not None and size > 1:
            raise UserError(f"model.device={device} puts {size} processes on one GPU; leave it at auto.")
        count = torch.cuda.device_count()
        if beside > count:
            raise UserError(
                f"{beside} processes were launched here for {count} GPUs, and each takes one: launch "
                f"{max(count, 1)} (--nproc-per-node {max(count, 1)}), or train on the CPU (model.device=cpu)."
            )
        torch.cuda.set_device(local)
        place = torch.device("cuda", local)
    backend = "nccl" if place.type == "cuda" else "gloo"
    if not (dist.is_available() and dist.is_backend_available(backend)):
        raise UserError(
            f"{size} processes were launched, but this torch has no {backend}, by which they would talk: install a "
            "torch that has it, or launch one process."
        )
    try:
        _store, rank, size = next(rendezvous("env://"))
        dist.init_process_group(backend, store=_store, rank=rank, world_size=size, timeout=PATIENCE)
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"The {size} processes cannot connect to each other: {str(error).splitlines()[0]}"
        ) from None
    if rank:
        logging.getLogger("lopd_fast").setLevel(logging.ERROR)
    return World(rank, size, True, place)


def leave() -> None:
    """Part from the other processes."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def first_to_speak() -> bool:
    """Whether this process is to report what ends the run: the first that asks, or rank 0 before all have met."""
    if _store is None:
        return os.environ.get("RANK", "0") == "0"
    try:
        return _store.add("lopd_fast/failed", 1) == 1
    except RuntimeError:  # the launcher is gone
        return False
