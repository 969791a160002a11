"""What the kernels of the perceiver attention share: sizes, tiles, products, and which program takes which keys.

Tiles are as wide as the next power of two of D, masked. Scores are summed over STEP columns of D at a time, so that
wide heads fit the registers. Products are of the inputs' own dtype (fp32 ones in three TF32 steps), sums fp32.
"""

# A type checker takes a kernel for the plain function under @triton.jit.
# pyright: reportCallIssue=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

CHUNK_KEYS = (1024, 512, 256, 128)  # the largest that gives PROGRAMS is taken
PROGRAMS = 1056  # eight on each of 132 multiprocessors


def constants(kernel: str, queries: int, dim_head: int, dtype: torch.dtype) -> dict:
    """What a kernel is compiled for, and its launch: none spills by bench/sass_report.py, D up to 256."""
    interpreted = knobs.runtime.interpret
    exact = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]
    width = max(16, triton.next_power_of_2(dim_head))
    small = width <= 128 and dtype != torch.float32
    if interpreted:
        step = width  # one step is the quickest there
    elif small:
        step = min(width, 64) if kernel == "latent_gradient" else width
    else:
        step = 16 if kernel in ("attend_combine", "memory_gradient") else 32
    block_q = 32 if queries > 16 and small else 16
    few_warps = width <= 64 or (kernel == "query_gradient_chunk" and block_q == 16)
    alone = kernel in ("attend_combine", "latent_gradient")  # a program a sample, with the latents for keys
    return dict(
        D=dim_head,
        WIDTH=width,
        STEP=step,
        DTYPE=tl.float32 if interpreted else exact,  # the interpreter multiplies bf16 as raw bits
        BLOCK_Q=block_q,
        BLOCK_K=block_q if alone else 64 if small and width > 64 else 32,
        num_warps=4 if small and few_warps else 8,
        num_stages=2 if kernel in ("attend_chunk", "query_gradient_chunk") else 1,
    )


@triton.jit
def load_tile(ptr, rows, valid, first, COLUMNS: tl.constexpr, D: tl.constexpr, DTYPE: tl.constexpr):
    """Columns first:first + COLUMNS of rows at int64 offsets  # (ROWS, COLUMNS), zeros where there is nothing."""
    columns = first + tl.arange(0, COLUMNS)
    mask = valid[:, None] & (columns < D)[None, :]
    return tl.load(ptr + rows[:, None] + columns[None, :], mask=mask, other=0.0).to(DTYPE)


@triton.jit
def store_tile(ptr, rows, valid, tile, D: tl.constexpr):
    columns = tl.arange(0, tile.shape[1])
    mask = valid[:, None] & (columns < D)[None, :]
    tl.store(ptr + rows[:, None] + columns[None, :], tile.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def inner(one, other, D: tl.constexpr, STEP: tl.constexpr, DTYPE: tl.constexpr):
    """Inner products of rows  # (rows of one, rows of other) fp32; each is (pointer, offsets of rows, valid)."""
    product = tl.zeros((one[1].shape[0], other[1].shape[0]), tl.float32)
    for first in range(0, D, STEP):
        left = load_tile(one[0], one[1], one[2], first, STEP, D, DTYPE)
        right = load_tile(other[0], other[1], other[2], first, STEP, D, DTYPE)
        product = tl.dot(left, tl.trans(right), product, input_precision="tf32x3")
    return product


@triton.jit
def add_weighted(sums, weights, tile):
    """sums + weights tile."""
    return tl.dot(weights.to(tile.dtype), tile, sums, input_precision="tf32x3")


def chunk_keys(tokens: int, heads: int) -> int:
    """Keys of a chunk: as many as leave the device enough programs."""
    return next((keys for keys in CHUNK_KEYS if tokens * heads >= PROGRAMS * keys), CHUNK_KEYS[-1])


def chunk_table(
    offsets: list[int] | tuple[int, ...], keys: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Chunks (n, 3) int64 of sample, first and last row, and the range (B + 1,) int64 of each sample's chunks."""
    asked = (tuple(offsets), keys, device)
    if asked not in _tables:
        ends = torch.tensor(offsets)
        counts = (ends.diff() + keys - 1) // keys
        ranges = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        sample = torch.arange(len(counts)).repeat_interleave(counts)
        start = ends[sample] + keys * (torch.arange(len(sample)) - ranges[sample])
        chunks = torch.stack([sample, start, torch.minimum(start + keys, ends[sample + 1])], dim=1)
        if len(_tables) == 8:
            _tables.clear()
        _tables[asked] = chunks.to(device), ranges.to(device)
    return _tables[asked]


_tables: dict[
    tuple, tuple[Tensor, Tensor]
] = {}  # every layer of a forward and backward pass asks for the same two


def whole_rows(x: Tensor) -> Tensor:
    """(B, Q, H, D) -> (B * Q, H, D) with the heads of a row next to each other; a view where it can be."""
    return _whole_heads(x.flatten(0, 1))


def halves(x: Tensor) -> tuple[Tensor, Tensor, int]:
    """(rows, 2, H, D) -> keys and values (rows, H, D), and the stride of a row."""
    key, value = _whole_heads(x).unbind(1)
    return key, value, key.stride(0)


def _whole_heads(x: Tensor) -> Tensor:
    heads, dim = x.shape[-2:]
    return x if x.stride(-1) == 1 and (heads == 1 or x.stride(-2) == dim) else x.contiguous()
