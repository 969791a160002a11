"""What the kernels of the loss share: how logits are read, accurate elementary functions, and sizes.

A kernel sees raw logits x and works on

    z = gain * (x + bias)                   without a soft-cap
    z = cap_gain * tanh(gain * (x + bias))  with one

so that temperature, logit scale, bias and soft-cap cost no pass of their own. Arithmetic is fp32 whatever the dtype of
x. `tl.exp` and `tl.log` are good to about 2 ulp; expm1, log1p and tanh are built from them here, because libdevice is
not there in the interpreter and a plain `exp(x) - 1` loses every digit near 0.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64  # columns of a block: the unit of the statistics and of the top-k search
NEG_INF = tl.constexpr(float("-inf"))


@triton.jit
def expm1(x):
    """e^x - 1."""
    series = x * (1 + x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720 + x / 5040))))))
    return tl.where(tl.abs(x) < 0.35, series, tl.exp(x) - 1)


@triton.jit
def expm1_minus(x):
    """e^x - 1 - x, >= 0."""
    series = x * x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720 + x / 5040)))))
    return tl.where(tl.abs(x) < 0.35, series, tl.exp(x) - 1 - x)


@triton.jit
def log1p(x):
    """log(1 + x), x > -1: the logarithm of the rounded sum, and what rounding took off it to first order."""
    total = 1 + x
    return tl.log(total) + (x - (total - 1)) / total


@triton.jit
def tanh(x):
    grown = expm1(tl.minimum(2 * tl.abs(x), 40.0))
    size = grown / (grown + 2)
    return tl.where(x < 0, -size, size)


@triton.jit
def to_logit(x, bias, gain, cap_gain, SOFTCAP: tl.constexpr):
    """z of a raw logit, both fp32."""
    z = (x + bias) * gain
    if SOFTCAP:
        z = tanh(z) * cap_gain
    return z


@triton.jit
def load_logits(row, columns, mask, BIAS: tl.constexpr, SOFTCAP: tl.constexpr):
    """z at some columns, -inf where masked; row is (its pointer, bias_ptr, column_stride, gain, cap_gain)."""
    row_ptr, bias_ptr, column_stride, gain, cap_gain = row
    x = tl.load(row_ptr + columns.to(tl.int64) * column_stride, mask=mask, other=0.0)
    bias = 0.0
    if BIAS:
        bias = tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    return tl.where(mask, to_logit(x.to(tl.float32), bias, gain, cap_gain, SOFTCAP), NEG_INF)


@triton.jit
def row_offset(offsets_ptr, row, ALIGNED: tl.constexpr):
    """Where a row starts, int64. Told that it is a multiple of 16, the compiler reads 16 bytes at a time."""
    offset = tl.load(offsets_ptr + row)
    if ALIGNED:
        offset = tl.multiple_of(offset, 16)
    return offset


class Logits:
    """Logits (..., V) of any strides as rows for a kernel, and what makes z of them."""

    def __init__(
        self,
        x: Tensor,
        index: Tensor | None = None,
        *,
        bias: Tensor | None = None,
        gain: float = 1.0,
        cap_gain: float | None = None,
    ) -> None:
        """index  # (R,) which rows of the flattened leading dimensions; None: all."""
        lead, strides = x.shape[:-1], x.stride()[:-1]
        self.x, self.index, self.width = x, index, x.shape[-1]
        rows = torch.arange(lead.numel(), device=x.device) if index is None else index
        self.count = len(rows)
        offsets = torch.zeros_like(rows)
        for size, stride in zip(reversed(lead), reversed(strides), strict=True):
            offsets += rows % max(size, 1) * stride
            rows = rows // max(size, 1)
        self.offsets = offsets  # (R,) int64
        self.aligned = x.stride(-1) == 1 and all(
            stride % 16 == 0 for size, stride in zip(lead, strides, strict=True) if size > 1
        )
        self.bias, self.gain, self.cap_gain = bias, gain, cap_gain

    def arguments(self) -> tuple:
        """logits_ptr, bias_ptr, offsets_ptr, column_stride, gain, cap_gain of a kernel."""
        bias = self.x if self.bias is None else self.bias
        return self.x, bias, self.offsets, self.x.stride(-1), float(self.gain), float(self.cap_gain or 1.0)

    def flags(self) -> dict[str, bool]:
        return dict(BIAS=self.bias is not None, SOFTCAP=self.cap_gain is not None, ALIGNED=self.aligned)

    def values(self) -> Tensor:
        """z (R, V) in fp32 (fp64 for fp64), by plain torch: what the references of the kernels start from."""
        z = self.x.reshape(-1, self.width)
        z = z if self.index is None else z[self.index]
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        z = (z if self.bias is None else z + self.bias) * self.gain
        return z if self.cap_gain is None else z.tanh() * self.cap_gain


def block_count(width: int) -> int:
    return -(-width // BLOCK)


def lane_count(k: int) -> int:
    """Lanes for a support and its tail."""
    return max(16, triton.next_power_of_2(k + 1))
