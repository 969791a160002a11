"""An output head: projects rows to logits, and multiplies gradients of logits back to rows, weight and bias."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

WEIGHT_ROWS = 8192  # rows of a half-precision weight that a CPU widens at a time, and of one that is gathered
HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Projection:
    """logits = softcap(logit_scale * (h W^T + b)), softcap(x) = logit_softcap tanh(x / logit_softcap)."""

    logit_scale: float
    logit_softcap: float | None


class Head:
    """One weight (V, H) with an optional bias, and the sums of their gradients over chunks.

    Products take operands in `operand`, a half precision or the dtype of the sums, and give the dtype of the sums:
    logits of half-precision heads are never rounded to half precision. A device multiplies the halves as they are; a
    CPU widens the weight piece by piece.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        projection: Projection,
        temperature: float,
        operand: torch.dtype,
        dtype: torch.dtype,
        wanted: tuple[bool, bool],
    ) -> None:
        """`dtype` is that of the sums, fp32 or fp64; `wanted` says whether weight and bias get a gradient."""
        self.weight, self.bias, self.operand, self.dtype = weight, bias, operand, dtype
        self.native = weight.is_cuda and operand in HALF
        self.cap = projection.logit_softcap
        self.gain = projection.logit_scale / (temperature if self.cap is None else self.cap)  # on h W^T + b
        self.cap_gain = 1.0 if self.cap is None else self.cap / temperature  # on tanh
        # d (logits / temperature) / d (h W^T + b), but for the slope of the soft-cap
        self.chain = projection.logit_scale / temperature
        self.weight_sum: Tensor | None = None  # (H,), once a filter asks for it
        # Sums over chunks stay in fp32 (fp64): in bf16 they would stop growing after some hundred chunks.
        self.weight_grad = weight.new_zeros(weight.shape, dtype=dtype) if wanted[0] else None
        self.bias_grad = weight.new_zeros(weight.shape[0], dtype=dtype) if wanted[1] else None

    @property
    def trains(self) -> bool:
        return self.weight_grad is not None or self.bias_grad is not None

    def _operand(self, x: Tensor) -> Tensor:
        x = x.to(self.operand)
        return x if self.native else x.to(self.dtype)

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """The weight as an operand, in one piece if that takes no copy or the device keeps halves."""
        width = self.weight.shape[0]
        whole = self.native or self.weight.dtype == self.operand == self.dtype
        step = width if whole else WEIGHT_ROWS
        for start in range(0, width, step):
            part = slice(start, min(start + step, width))
            yield part, self._operand(self.weight[part])

    def project(self, hidden: Tensor, out: Tensor) -> None:
        """Writes logits over the temperature of hidden  # (R, H) to out  # (R, V)."""
        hidden = self._operand(hidden)
        for part, weight in self._blocks():
            if self.native:
                torch.mm(hidden, weight.t(), out_dtype=self.dtype, out=out[:, part])
            else:
                torch.mm(hidden, weight.t(), out=out[:, part])
        if self.bias is not None:
            out.add_(self.bias.to(self.dtype))
        if self.gain != 1:
            out.mul_(self.gain)
        if self.cap is not None:
            out.tanh_().mul_(self.cap_gain)

    def slope(self, logits: Tensor) -> Tensor | None:
        """d softcap(x) / dx = 1 - tanh^2 at capped logits over the temperature  # (R, V); None without a soft-cap."""
        if self.cap is None:
            return None
        return logits.div(self.cap_gain).square_().neg_().add_(1)

    def add_gradients(self, grad: Tensor, hidden: Tensor) -> None:
        """Adds a chunk to the sums: grad  # (R, V) with respect to h W^T + b, hidden  # (R, H)."""
        if self.bias_grad is not None:
            self.bias_grad.add_(grad.sum(0))
        if self.weight_grad is not None:
            if self.native:
                product = torch.mm(grad.to(self.operand).t(), self._operand(hidden), out_dtype=self.dtype)
                self.weight_grad.add_(product)
            else:
                self.weight_grad.addmm_(grad.t(), self._operand(hidden))

    def hidden_gradient(self, grad: Tensor) -> Tensor:
        """grad  # (R, V) with respect to h W^T + b -> (R, H) with respect to h."""
        if self.native:
            return torch.mm(grad.to(self.operand), self._operand(self.weight), out_dtype=self.dtype)
        out = grad.new_empty(grad.shape[0], self.weight.shape[1])
        for part, weight in self._blocks():
            torch.addmm(out, grad[:, part], weight, beta=0 if part.start == 0 else 1, out=out)
        return out

    def filtered_hidden_gradient(self, grad: Tensor, cut: float, scale: Tensor) -> Tensor:
        """`hidden_gradient` over the columns in which a row of grad passes cut * min(scale  # (), the largest of grad).

        The others enter as (sum of their gradient) x (mean of their weight rows): nearly all of what they hold is a
        small pull of the same sign on most of the vocabulary. Exact where more than half of the columns are active.
        """
        largest = torch.linalg.vector_norm(grad, ord=torch.inf, dim=0)  # (V,)
        active = (largest > cut * torch.minimum(scale, largest.amax())).nonzero().squeeze(1)
        width = self.weight.shape[0]
        if 2 * len(active) > width:
            return self.hidden_gradient(grad)
        if self.weight_sum is None:
            self.weight_sum = self.weight.sum(0, dtype=self.dtype)
        out = grad.new_zeros(grad.shape[0], self.weight.shape[1])
        gradient_left, weight_left = grad.sum(1), self.weight_sum
        for columns in active.split(WEIGHT_ROWS):
            part, weight = grad.index_select(1, columns), self._operand(self.weight.index_select(0, columns))
            if self.native:
                out.add_(torch.mm(part.to(self.operand), weight, out_dtype=self.dtype))
            else:
                out.addmm_(part, weight)
            gradient_left = gradient_left - part.sum(1)
            weight_left = weight_left - weight.sum(0, dtype=self.dtype)
        return out.addr_(gradient_left, weight_left / (width - len(active)))
