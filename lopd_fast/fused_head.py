"""An output head: projects rows to logits, and multiplies gradients of logits back to rows, weight and bias."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

WEIGHT_ROWS = 8192  # rows of a weight that are widened, gathered or differentiated at a time
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
        self.cap = projection.logit_softcap
        self.gain = projection.logit_scale / (temperature if self.cap is None else self.cap)  # on h W^T + b
        self.cap_gain = 1.0 if self.cap is None else self.cap / temperature  # on tanh
        # d (logits / temperature) / d (h W^T + b), but for the slope of the soft-cap
        self.chain = projection.logit_scale / temperature
        self.typical: tuple[Tensor, Tensor] | None = (
            None  # of `filtered_hidden_gradient`: shares (V,) and their row (H,)
        )
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

    def multiply(self, hidden: Tensor, out: Tensor) -> None:
        """Writes h W^T of hidden  # (R, H) to out  # (R, V)."""
        hidden = self._operand(hidden)
        for part, weight in self._blocks():
            if self.native:
                multiply_halves(hidden, weight.t(), self.dtype, out=out[:, part])
            else:
                torch.mm(hidden, weight.t(), out=out[:, part])

    def to_logits_(self, products: Tensor) -> None:
        """Turns h W^T  # (R, V) into logits over the temperature."""
        if self.bias is not None:
            products.add_(self.bias.to(self.dtype))
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
        hidden = self._operand(hidden)
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
        for part, weight in self._blocks():
            self._add_product(out, grad[:, part], weight, beta=0 if part.start == 0 else 1)
        return out

    def filtered_hidden_gradient(
        self, grad: Tensor, sign: Tensor, kept: Tensor, cut: float, scale: Tensor, whole: bool
    ) -> Tensor:
        """`hidden_gradient` over the columns that matter; the others enter as their sum times one typical weight row.

        That row weighs the weight rows of the others by what they held in the first chunk: nearly all of it is a small
        pull of one sign on most of the vocabulary. Exact where more than half of the columns matter.

        sign, kept, cut, scale  # as in `active_columns`
        whole                   # grad is not a shard of the vocabulary
        """
        active, shares = self.active_columns(grad, sign, kept, cut, scale)
        if 2 * len(active) > len(shares):
            return self.hidden_gradient(grad)
        if self.typical is None:
            shares = shares.clamp(1e-3, 1)  # at least that, so that what is left of them does not cancel
            row = self.weight.new_zeros(1, self.weight.shape[1], dtype=self.dtype)
            for part, weight in self._blocks():
                self._add_product(row, shares[None, part], weight)
            self.typical = shares, row[0]
        shares, row = self.typical
        share = shares.sum()
        out = self.weight.new_zeros(grad.shape[0], self.weight.shape[1], dtype=self.dtype)
        # A gradient of a softmax sums to 0 over the vocabulary; rounded to halves it does so too roughly.
        balanced = whole and self.cap is None and not self.native
        left = grad.new_zeros(len(grad)) if balanced else grad.sum(1, dtype=self.dtype)
        # Written over by every piece: fresh memory costs a CPU more than the gather itself.
        step = min(WEIGHT_ROWS, len(active))
        parts, rows = grad.new_empty(len(grad) * step), self.weight.new_empty(step, self.weight.shape[1])
        for columns in active.split(step):
            part = parts[: len(grad) * len(columns)].view(len(grad), -1)
            torch.index_select(grad, 1, columns, out=part)
            weight = self._operand(torch.index_select(self.weight, 0, columns, out=rows[: len(columns)]))
            self._add_product(out, part, weight)
            left -= part.sum(1, dtype=self.dtype)
            row = row - self._product(shares[None, columns], weight)[0]
            share = share - shares[columns].sum()
        return out.addr_(left, row / share)

    def active_columns(
        self, grad: Tensor, sign: Tensor, kept: Tensor, cut: float, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The columns that matter, rising, and for every column its share of what makes one matter  # (V,).

        That is the sum of |grad| over the R rows, which is at least the column's 2-norm, over

            sqrt(R) * cut * min(scale  # (), the largest of grad)

        sign  # (R,) of grad outside the kept columns
        kept  # (R, m) columns of explicit values, the largest among them: they always matter
        """
        largest = grad.gather(1, kept).abs().amax().to(self.dtype)
        limit = (cut * len(grad) ** 0.5 * torch.minimum(scale, largest)).clamp(
            min=torch.finfo(self.dtype).tiny
        )
        shares = self._product(sign[None], grad)[0].abs_() / limit
        return (shares > 1).index_fill_(0, kept.flatten(), True).nonzero().squeeze(1), shares

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        if self.native:
            return multiply_halves(a.to(self.operand), b.to(self.operand), self.dtype)
        return a @ b

    def _add_product(self, out: Tensor, a: Tensor, b: Tensor, beta: int = 1) -> None:
        """out = beta * out + a @ b."""
        if not self.native:
            torch.addmm(out, a, b, beta=beta, out=out)
        elif beta:
            out.add_(self._product(a, b))
        else:
            multiply_halves(a.to(self.operand), b.to(self.operand), self.dtype, out=out)
