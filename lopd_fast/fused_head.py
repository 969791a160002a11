"""An output head: projects rows to logits, and multiplies gradients of logits back to rows, weight and bias."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

WEIGHT_ROWS = 8192  # rows of a weight that are widened, gathered or differentiated at a time
ROWS_BYTES = 16 << 20  # of single rows of a weight, gathered at a time
HALF = (torch.bfloat16, torch.float16)
HALF_DEVICES = ("cuda",)  # which multiply halves into wide sums


@dataclass(frozen=True)
class Projection:
    """logits = softcap(logit_scale * (h W^T + b)), softcap(x) = logit_softcap tanh(x / logit_softcap)."""

    logit_scale: float
    logit_softcap: float | None


def multiply_halves(a: Tensor, b: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """a @ b of half-precision operands, summed and given in `dtype`."""
    return torch.mm(a, b, out_dtype=dtype, out=out)


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
        self.native = weight.device.type in HALF_DEVICES and operand in HALF
        self.widens = not self.native and not weight.dtype == operand == dtype  # its weight, to multiply
        self.cap = projection.logit_softcap
        self.gain = projection.logit_scale / (temperature if self.cap is None else self.cap)  # on h W^T + b
        self.cap_gain = 1.0 if self.cap is None else self.cap / temperature  # on tanh
        # d (logits / temperature) / d (h W^T + b), but for the slope of the soft-cap
        self.chain = projection.logit_scale / temperature
        # Sums over chunks stay in fp32 (fp64): in bf16 they would stop growing after some hundred chunks.
        self.weight_grad = weight.new_zeros(weight.shape, dtype=dtype) if wanted[0] else None
        self.bias_grad = weight.new_zeros(weight.shape[0], dtype=dtype) if wanted[1] else None

    @property
    def trains(self) -> bool:
        return self.weight_grad is not None or self.bias_grad is not None

    def operand_of(self, x: Tensor) -> Tensor:
        """x as products take it."""
        x = x.to(self.operand)
        return x if self.native else x.to(self.dtype)

    def blocks(self, columns: int | None = None) -> Iterator[tuple[slice, Tensor]]:
        """The weight as an operand, `columns` ids at a time.

        None: in one piece if that takes no copy or the device keeps halves.
        """
        width = self.weight.shape[0]
        step = columns or (WEIGHT_ROWS if self.widens else width)
        for start in range(0, width, step):
            part = slice(start, min(start + step, width))
            yield part, self.operand_of(self.weight[part])

    def multiply(self, hidden: Tensor, out: Tensor) -> None:
        """Writes h W^T of hidden  # (R, H) to out  # (R, V)."""
        hidden = self.operand_of(hidden)
        for part, weight in self.blocks():
            self._multiply(hidden, weight, out[:, part])

    def project(self, hidden: Tensor, part: slice, weight: Tensor, out: Tensor) -> None:
        """Writes logits over the temperature to out  # (R, C), from operands hidden  # (R, H) and a block (C, H)."""
        self._multiply(hidden, weight, out)
        self.to_logits_(out, part)

    def to_logits_(self, products: Tensor, part: slice = slice(None)) -> None:
        """Turns h W^T  # (R, V), or its columns `part`, into logits over the temperature."""
        if self.bias is not None:
            products.add_(self.bias[part].to(self.dtype))
        if self.gain != 1:
            products.mul_(self.gain)
        if self.cap is not None:
            products.tanh_().mul_(self.cap_gain)

    def slope(self, logits: Tensor) -> Tensor | None:
        """d softcap(x) / dx = 1 - tanh^2 at capped logits over the temperature  # (R, V); None without a soft-cap."""
        if self.cap is None:
            return None
        return logits.div(self.cap_gain).square_().neg_().add_(1)

    def add_gradients(self, grad: Tensor, hidden: Tensor) -> None:
        """Adds a chunk to the sums: grad  # (R, V) with respect to h W^T + b, hidden  # (R, H)."""
        if self.bias_grad is not None:
            self.bias_grad.add_(grad.sum(0, dtype=self.dtype))
        if self.weight_grad is None:
            return
        hidden = self.operand_of(hidden)
        if not self.native:
            self.weight_grad.addmm_(grad.t(), hidden)
            return
        for into, columns in zip(
            self.weight_grad.split(WEIGHT_ROWS), grad.split(WEIGHT_ROWS, 1), strict=True
        ):
            into.add_(multiply_halves(columns.to(self.operand).t(), hidden, self.dtype))

    def hidden_gradient(self, grad: Tensor) -> Tensor:
        """grad  # (R, V) with respect to h W^T + b -> (R, H) with respect to h."""
        out = self.weight.new_empty(grad.shape[0], self.weight.shape[1], dtype=self.dtype)
        for part, weight in self.blocks():
            self.add_product(out, grad[:, part], weight, beta=0 if part.start == 0 else 1)
        return out

    def weighted_rows(self, columns: Tensor, values: Tensor) -> Tensor:
        """Sums of rows of the weight: out_n = Σ_m values_nm W[columns_nm]  # (R, m), (R, m) -> (R, H)."""
        hidden = self.weight.shape[1]
        step = max(1, ROWS_BYTES // max(1, self.dtype.itemsize * columns.shape[1] * hidden))
        parts = [
            torch.bmm(of_rows[:, None], self.operand_of(self.weight[at]).to(self.dtype))[:, 0]
            for at, of_rows in zip(columns.split(step), values.split(step), strict=True)
        ]
        return torch.cat(parts)

    def _multiply(self, hidden: Tensor, weight: Tensor, out: Tensor) -> None:
        if self.native:
            multiply_halves(hidden, weight.t(), self.dtype, out=out)
        else:
            torch.mm(hidden, weight.t(), out=out)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """a @ b."""
        if self.native:
            return multiply_halves(a.to(self.operand), b.to(self.operand), self.dtype)
        return a @ b

    def add_product(self, out: Tensor, a: Tensor, b: Tensor, beta: int = 1) -> None:
        """out = beta * out + a @ b."""
        if not self.native:
            torch.addmm(out, a, b, beta=beta, out=out)
        elif beta:
            out.add_(self.product(a, b))
        else:
            multiply_halves(a.to(self.operand), b.to(self.operand), self.dtype, out=out)
