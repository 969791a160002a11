"""The gradient of the loss with respect to raw logits: a scaled softmax of the tail, and k explicit values.

    dz_j = weight kl_support_j - margin e^{log_support_j}                 j in S
         = (weight kl_tail - margin e^{log_tail}) e^{z_j - tail_lse}      j outside
    dz_a += margin                                                        a the label, where there is a margin
    dx_j = gain dz_j                                                      without a soft-cap
         = gain cap_gain (1 - (z_j / cap_gain)^2) dz_j                    with one

Shapes: logits (N, V), any strides; per row of the record weight, margin (R,) fp32. The gradient goes to `out` (N, V),
rows without a record as zeros and unread, or over the logits themselves. Reads logits once, writes the gradient once.
"""

# A type checker takes a kernel for the plain function under @triton.jit.
# pyright: reportCallIssue=false, reportOperatorIssue=false

import triton
import triton.language as tl
from torch import Tensor

from lopd_fast.kernels._common import Logits, load_logits, row_offset


def bytes_moved(rows: int, width: int, itemsize: int, out_itemsize: int, k: int) -> int:
    return rows * (width * (itemsize + out_itemsize) + triton.cdiv(width, LAUNCH["TILE"]) * (16 * k + 40))


def flops(rows: int, width: int) -> int:
    return rows * width * 4  # scale, subtract, exponential, multiply


# Columns a program takes, warps: 16 numbers a thread, no spill by bench/sass_report.py.
LAUNCH = dict(TILE=4096, num_warps=8)


def support_constants(k: int) -> dict[str, int]:
    return dict(K=k, LANES=max(16, triton.next_power_of_2(k)))


@triton.jit
def logits_grad_kernel(
    logits_ptr,
    bias_ptr,
    offsets_ptr,  # (R,)
    column_stride,
    gain,
    cap_gain,
    position_ptr,  # (N,) row of the record, -1 for none
    out_ptr,
    out_row_stride,
    out_column_stride,
    log_support_ptr,  # (R, K)
    kl_support_ptr,  # (R, K)
    log_tail_ptr,
    tail_lse_ptr,
    kl_tail_ptr,
    weight_ptr,
    margin_ptr,
    ids_ptr,  # (R, K)
    labels_ptr,
    width,
    tiles,
    POSITION: tl.constexpr,
    MARGIN: tl.constexpr,
    BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIGNED: tl.constexpr,
    K: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
):
    program = tl.program_id(0)
    out_row = (program // tiles).to(tl.int64)
    start = (program % tiles) * TILE
    columns = start + tl.arange(0, TILE)
    row = out_row
    if POSITION:
        row = tl.load(position_ptr + out_row)
    end = tl.where(row >= 0, width, 0)  # nothing is read of a row without a record
    row = tl.maximum(row, 0)

    weight = tl.load(weight_ptr + row)
    tail = weight * tl.load(kl_tail_ptr + row)
    lane = tl.arange(0, LANES)
    ids = tl.load(ids_ptr + row * K + lane, mask=lane < K, other=-1)
    here = (ids >= start) & (ids < tl.minimum(start + TILE, end))
    support = weight * tl.load(kl_support_ptr + row * K + lane, mask=here, other=0.0)
    margin = 0.0
    label = -1
    if MARGIN:
        margin = tl.load(margin_ptr + row)
        label = tl.load(labels_ptr + row).to(tl.int32)
        tail -= margin * tl.exp(tl.load(log_tail_ptr + row))
        support -= margin * tl.exp(tl.load(log_support_ptr + row * K + lane, mask=here, other=0.0))
        support += tl.where(ids == label, margin, 0.0)

    logits = (logits_ptr + row_offset(offsets_ptr, row, ALIGNED), bias_ptr, column_stride, gain, cap_gain)
    mask = columns < end
    z = load_logits(logits, columns, mask, BIAS, SOFTCAP)
    grad = tail * tl.exp(z - tl.load(tail_lse_ptr + row))
    if MARGIN:
        grad += tl.where(columns == label, margin, 0.0)
    if SOFTCAP:
        z_support = load_logits(logits, ids, here, BIAS, SOFTCAP)
        ratio = tl.where(mask, z, 0.0) / cap_gain
        grad *= cap_gain * (1 - ratio * ratio)
        ratio = tl.where(here, z_support, 0.0) / cap_gain
        support *= cap_gain * (1 - ratio * ratio)
        tl.debug_barrier()  # in place, the support is read before any thread writes
    grad = tl.where(mask, grad * gain, 0.0)
    support *= gain

    out_ptr += out_row * out_row_stride
    at = out_ptr + columns.to(tl.int64) * out_column_stride
    tl.store(at, grad.to(out_ptr.dtype.element_ty), mask=columns < width)
    tl.debug_barrier()  # the support's values go over the dense ones
    at = out_ptr + ids * out_column_stride
    tl.store(at, support.to(out_ptr.dtype.element_ty), mask=here)


def logits_grad(
    logits: Logits,
    out: Tensor,
    position: Tensor | None,
    ids: Tensor,
    side: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    weight: Tensor,
    margin: Tensor | None,
    labels: Tensor | None,
) -> Tensor:
    """Writes the gradient to out  # (N, V), which may be the logits themselves, and returns it.

    position        # (N,) int64, row of the record (and of `logits`) for each row of out, -1: none; None: the same
    side            # log_support (R, k), log_tail, tail_lse (R,), kl_support (R, k), kl_tail (R,)
    weight, margin  # (R,) upstream gradients of D and of the margin
    """
    rows, k = len(out), ids.shape[1]
    if out.numel() == 0:
        return out
    if logits.count == 0:
        return out.zero_()
    log_support, log_tail, tail_lse, kl_support, kl_tail = (x.contiguous() for x in side)
    assert margin is None or labels is not None
    tiles = triton.cdiv(logits.width, LAUNCH["TILE"])
    logits_grad_kernel[(rows * tiles,)](
        *logits.arguments(),
        ids if position is None else position,
        out,
        out.stride(0),
        out.stride(1),
        log_support,
        kl_support,
        log_tail,
        tail_lse,
        kl_tail,
        weight.contiguous(),
        weight if margin is None else margin.contiguous(),
        ids.contiguous(),
        ids if labels is None else labels,
        logits.width,
        tiles,
        POSITION=position is not None,
        MARGIN=margin is not None,
        **logits.flags(),
        **support_constants(k),
        **LAUNCH,
    )
    return out


def logits_grad_ref(
    logits: Logits,
    ids: Tensor,
    side: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    weight: Tensor,
    margin: Tensor | None,
    labels: Tensor | None,
) -> Tensor:
    """(R, V), the rows of the record alone."""
    log_support, log_tail, tail_lse, kl_support, kl_tail = side
    z = logits.values()
    tail, support = weight * kl_tail, weight[:, None] * kl_support
    if margin is not None:
        tail, support = tail - margin * log_tail.exp(), support - margin[:, None] * log_support.exp()
    padded = z.new_zeros(len(z), logits.width + 1)  # the last column takes what padding would write
    grad = (z - tail_lse[:, None]).exp() * tail[:, None]
    padded[:, :-1] = grad
    grad = padded.scatter(1, ids.masked_fill(ids < 0, logits.width), support)[:, :-1]
    if margin is not None and labels is not None:
        grad = grad.scatter_add(1, labels[:, None], margin[:, None])
    if logits.cap_gain is not None:
        grad = grad * logits.cap_gain * (1 - (z / logits.cap_gain) ** 2)
    return grad * logits.gain
