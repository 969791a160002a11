"""A weight that is multiplied with several times, whose gradient is summed inside the products.

Autograd would compute one gradient as large as the weight per use and add them up. Here each use passes the weight on
to the next, so backward, which visits them in reverse, is handed the sum so far and adds its own product in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class SharedWeight:
    """F.linear with one weight (out, in), again and again, of its inputs or of an elementwise activation of them."""

    def __init__(self, weight: Tensor, activation: Callable[[Tensor], Tensor] | None = None) -> None:
        kind = weight.device.type
        self.weight = weight.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else weight
        self.activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        """x (..., in) -> (..., out), in the weight's dtype."""
        y, self.weight = _Linear.apply(x.to(self.weight.dtype), self.weight, self.activation)  # type: ignore
        return y


class _Linear(torch.autograd.Function):
    """activation(x) W^T and W itself, for the next use."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, activation: Callable[[Tensor], Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.activation = activation
        ctx.set_materialize_grads(False)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(activation(x) if activation else x, weight), weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_y: Tensor | None, d_weight: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        d_x = None
        if d_y is not None:
            with torch.autocast(x.device.type, enabled=False):
                active = x
                if ctx.activation:
                    with torch.enable_grad():
                        x = x.detach().requires_grad_()
                        active = ctx.activation(x)
                if ctx.needs_input_grad[1]:
                    rows, d_rows = active.detach().flatten(0, -2), d_y.flatten(0, -2)
                    d_weight = d_rows.mT @ rows if d_weight is None else d_weight.addmm_(d_rows.mT, rows)
                if ctx.needs_input_grad[0]:
                    d_x = d_y @ weight
                    if ctx.activation:
                        (d_x,) = torch.autograd.grad(active, x, d_x)
        return d_x, d_weight, None
