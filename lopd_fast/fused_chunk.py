"""What a chunk of the fused loss is computed from, by tiles (`fused_tiles`) or on the kernels (`loss_triton`)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lopd_fast.fused_head import Head
from lopd_fast.loss_rows import LossOptions


@dataclass(frozen=True)
class ChunkInput:
    """R rows, and the memory to work in."""

    hidden: list[Tensor]  # (R, H) of the student and, unless it is served, the teacher
    heads: list[Head]
    served: tuple[Tensor, Tensor] | None  # ids (R, k'), logprobs (R, k') in place of the teacher
    labels: Tensor | None  # (R,) global ids
    options: LossOptions
    logits: list[Tensor]  # (R, V): one a side, to hold it, or at most one, for the side that is searched
    tile: Tensor  # (R, C), C columns at a time, for a side that has no logits here; (0, C) if both have
    wanted: list[bool]  # whether `hidden_gradient` of a side will be asked for; of sides that are not held
