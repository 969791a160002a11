"""Sharded models in several processes: each weight is gathered by all of them together, so all must run alike.

A process with less to do than another runs the model on one token in place of what it lacks. The states of those runs
go into the loss with weight zero, so that the backward gathers the same weights in the same order everywhere.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lopd_fast.processes import World


class Lockstep:
    """Makes the processes of `world` run a model equally often; by default, for one process, it does nothing."""

    def __init__(self, world: World | None = None) -> None:
        self.world = world or World()
        self._idle: list[Tensor] = []

    @property
    def active(self) -> bool:
        """Whether there is anybody to keep up with."""
        return self.world.size > 1

    def turns(self, own: int) -> int:
        """How often to run for everybody to have run equally often, the process with the most included."""
        return self.world.most(own) if self.active else own

    def idle(self, turns: int, run: Callable[[], Tensor]) -> None:
        """`run()` for each turn that this process has nothing for."""
        for _ in range(turns):
            self._idle.append(run())

    def differentiable(self, embeddings: Tensor) -> Tensor:
        """`embeddings` such that a graph is built on them, as it is where latents with a gradient are among them."""
        if self.active and torch.is_grad_enabled() and not embeddings.requires_grad:
            return embeddings.detach().requires_grad_()
        return embeddings

    def join(self, loss: Tensor) -> Tensor:
        """`loss`, with the graphs of all idle runs attached to it."""
        for states in self._idle:
            loss = loss + states[:0].sum()
        self._idle.clear()
        return loss
