"""The states of a transformers model over packed sequences, by whatever attention the model runs.

tree   SDPA and eager attention take the tree's mask: shared tokens are computed once;
rows   FlashAttention finds where sequences begin from the positions and never builds a mask: nothing is shared;
single layers that are no plain attention (state spaces, linear attention) see one sequence at a time, and so does
       every model in rows too long for a mask.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lopd_fast.lockstep import Lockstep
from lopd_fast.prefix_tree import MASKED_TOKENS, Packed


def packing_of(model: PreTrainedModel) -> Literal["tree", "rows", "single"]:
    """How `model` takes several sequences in one row."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention", "sliding_attention"} or model._is_stateful:
        return "single"
    return "rows" if "flash" in str(config._attn_implementation) else "tree"


def packed_hidden(
    model: PreTrainedModel,
    packed: Packed,
    embeddings: Tensor | None = None,
    *,
    body: Callable[..., Any] | None = None,
    lockstep: Lockstep | None = None,
) -> Tensor:
    """Last hidden states (T, H) of packed tokens, or of embeddings (T, H) in their place.

    Outside of "tree", the sequences must have been packed without sharing. `body` runs the model, by default its own
    decoder; `lockstep` keeps the processes together that have parts of its weights.
    """
    packing, lockstep = packing_of(model), lockstep or Lockstep()
    decoder: Any = body or model.get_decoder()
    plain = len(packed.limits) == 1 or packing == "rows"
    masked = packing == "tree" and packed.ids.numel() <= MASKED_TOKENS
    runs = 1 if plain or masked else len(packed.limits)
    lacking = lockstep.turns(runs) - runs
    if plain:
        states = _run(decoder, packed, embeddings)
    elif masked:
        states = _run(decoder, packed, embeddings, _masks(model, packed))
    else:
        states = torch.cat(
            [_run(decoder, *_part(packed, embeddings, packed.runs == run)) for run in range(runs)]
        )
    lockstep.idle(lacking, lambda: _run(decoder, *_part(packed, embeddings, slice(1))))
    return states


def _part(packed: Packed, embeddings: Tensor | None, own: Tensor | slice) -> tuple[Packed, Tensor | None]:
    """The tokens `own` of one sequence that stands whole, as a row of their own."""
    one = Packed(packed.ids[own], packed.positions[own], packed.runs[own], packed.limits[:1, :1])
    return one, None if embeddings is None else embeddings[own]


def _run(
    body: Callable[..., Any],
    packed: Packed,
    embeddings: Tensor | None,
    mask: Tensor | dict[str, Tensor] | None = None,
) -> Tensor:
    given = {"input_ids": packed.ids[None]} if embeddings is None else {"inputs_embeds": embeddings[None]}
    output = body(**given, attention_mask=mask, position_ids=packed.positions[None], use_cache=False)
    return output.last_hidden_state[0]


def _masks(model: PreTrainedModel, packed: Packed) -> Tensor | dict[str, Tensor]:
    """The tree's mask (1, 1, T, T) in the form that the model's attention takes, by layer kind where it has kinds."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())

    def form(mask: Tensor) -> Tensor:
        if config._attn_implementation == "sdpa":
            return mask[None, None]
        additive = torch.zeros(mask.shape, dtype=model.dtype, device=mask.device)
        return additive.masked_fill_(~mask, torch.finfo(model.dtype).min)[None, None]

    if kinds:
        return {kind: form(packed.mask(window if kind == "sliding_attention" else None)) for kind in kinds}
    return form(packed.mask(window))
