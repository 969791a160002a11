"""The teacher: the frozen backbone without any adapter, reading latents that were spliced into its prompt.

Its activations stay in the graph. No weight of it learns; the gradient passes through it to the latents.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lopd_fast.backbone import Backbone
from lopd_fast.batch import Side


def splice(embeddings: Tensor, slots: Tensor, latents: Tensor) -> Tensor:
    """Embeddings (..., H) with `latents` (M, H) in the flat positions `slots` (M,); differentiable in the latents."""
    if slots.numel() != latents.shape[0]:
        raise ValueError(f"{latents.shape[0]} latents were given for {slots.numel()} slots.")
    flat = embeddings.reshape(-1, embeddings.shape[-1])
    return flat.index_copy(0, slots, latents.to(flat.dtype)).view_as(embeddings)


def teacher_hidden(backbone: Backbone, side: Side, latents: Sequence[Tensor]) -> Tensor:
    """Hidden states (N, H) at the supervised rows of the teacher's view, given every rollout's latents (L_b, H)."""
    with backbone.role("teacher"):
        embeddings = backbone.embed(side.packed.ids)
        latents = [embeddings.new_zeros(0, embeddings.shape[-1]), *latents]
        embeddings = splice(embeddings, side.slots, torch.cat(latents))
        return backbone.hidden(side.packed, embeddings)[side.rows]
