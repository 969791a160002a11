"""The part of verl that calls a distillation loss, restated for machines without verl (which brings Ray and more).

One module stands for all that `lopd_fast.integrations.verl` imports: `install` puts it into sys.modules under their
names. Facts are those of verl 0.9.1: a registry by loss mode whose settings say use_topk; a logits processor that is
looked up as a global of the losses module and gets (rows, tokens, V) logits with nested teacher lists; model outputs
that come back nested; a final loss that takes the response's tokens, each predicted one position earlier, clamps, and
divides by the tokens of the global batch; Megatron layouts that pad sequences with zeros to a multiple of the ranks.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

NAMES = """verl verl.trainer verl.trainer.distillation verl.trainer.distillation.losses verl.utils verl.utils.ulysses
verl.utils.tensordict_utils verl.utils.metric verl.workers verl.workers.utils verl.workers.utils.padding verl.models
verl.models.mcore verl.models.mcore.util megatron megatron.core megatron.core.parallel_state""".split()

losses = util = parallel_state = sys.modules[__name__]

DISTILLATION_LOSS_REGISTRY: dict[str, Any] = {}
DISTILLATION_SETTINGS_REGISTRY: dict[str, Any] = {}


@dataclass
class DistillationLossSettings:
    names: list[str] = field(default_factory=list)
    use_topk: bool = False
    use_estimator: bool = False


@dataclass
class Metric:
    aggregation: str
    value: Any


@dataclass
class Ranks:
    """Where this process stands: Ulysses (rank, size), tensor-parallel (rank, size, group)."""

    ulysses: tuple[int, int] = (0, 1)
    tensor: tuple[int, int, Any] = (0, 1, None)


ranks = Ranks()


def _builtin_topk_loss(
    config: Any, distillation_config: Any, data: Any, student_logits: Tensor, data_format: str
):
    return {"distillation_losses": student_logits.new_full(student_logits.shape[:2], 7.0)}


compute_topk_loss = _builtin_topk_loss


def install(patch: pytest.MonkeyPatch) -> Any:
    """A fresh verl without our loss modes, until the patch is undone."""
    here = sys.modules[__name__]
    for name in NAMES:
        patch.setitem(sys.modules, name, here)
    patch.setattr(here, "DISTILLATION_LOSS_REGISTRY", {"forward_kl_topk": None})
    patch.setattr(here, "DISTILLATION_SETTINGS_REGISTRY", {})
    patch.setattr(here, "compute_topk_loss", _builtin_topk_loss)
    patch.setattr(here, "ranks", Ranks())
    return here


def distillation_ppo_loss(
    config: Any,
    distillation_config: Any,
    model_output: Any = None,
    data: Any = None,
    dp_group: Any = None,
    student_logits: Tensor | None = None,
    data_format: str = "thd",
) -> Any:
    """Logits processor if there are logits, else the final loss without task rewards, by token mean."""
    if student_logits is not None:
        return compute_topk_loss(config, distillation_config, data, student_logits, data_format)
    options = distillation_config.distillation_loss
    final = DISTILLATION_LOSS_REGISTRY[options.loss_mode]
    values, metrics = final(
        config=config, distillation_config=distillation_config, model_output=model_output, data=data
    )
    mask = data["response_mask"].bool()
    metrics["distillation/loss_max"] = Metric("max", values[mask].max())
    if options.loss_max_clamp is not None:
        values = values.clamp(-options.loss_max_clamp, options.loss_max_clamp)
    return (values * mask).sum() / data["batch_num_tokens"] * data["dp_size"], metrics


def get_non_tensor_data(data: Any, key: str, default: Any) -> Any:
    return data.get(key, default)


def no_padding_2_padding(tensor: Tensor, data: Any) -> Tensor:
    """Nested per-token values -> (batch, longest response): those predicted for the response's tokens."""
    longest = data["responses"].shape[1]
    prompts = data["attention_mask"][:, : data["prompts"].shape[1]].sum(1).tolist()
    rows = []
    for values, prompt in zip(tensor.unbind(), prompts, strict=True):
        response = values[prompt - 1 : -1]
        rows.append(pad(response, (0, longest - len(response))))
    return torch.stack(rows)


def get_ulysses_sequence_parallel_world_size() -> int:
    return ranks.ulysses[1]


def slice_input_tensor(x: Tensor, dim: int) -> Tensor:
    rank, size = ranks.ulysses
    assert dim == 1 and x.dim() == 3
    return pad(x, (0, 0, 0, -x.shape[1] % size)).chunk(size, dim=1)[rank]


def get_tensor_model_parallel_world_size() -> int:
    return ranks.tensor[1]


def get_tensor_model_parallel_group() -> Any:
    return ranks.tensor[2]


def get_context_parallel_world_size() -> int:
    return 1


def preprocess_thd_engine(nested: Tensor, pre_process: bool) -> tuple[Tensor, None]:
    """Each sequence padded with zeros to a multiple of the tensor-parallel ranks, then all in one row."""
    assert pre_process
    rows = [pad(x, (0, 0) * (x.dim() - 1) + (0, -len(x) % ranks.tensor[1])) for x in nested.unbind()]
    return torch.cat(rows)[None], None


def preprocess_bshd_engine(
    nested: Tensor, pre_process: bool, forced_max_seqlen: int | None
) -> tuple[Tensor, None]:
    """Sequences side by side, padded with zeros."""
    assert pre_process and forced_max_seqlen is None
    longest = max(len(x) for x in nested.unbind())
    longest += -longest % ranks.tensor[1]
    return torch.stack(
        [pad(x, (0, 0) * (x.dim() - 1) + (0, longest - len(x))) for x in nested.unbind()]
    ), None
