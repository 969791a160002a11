"""verl (0.9 and newer): the loss modes `reverse_kl_topk_tail` and `forward_kl_topk_tail`.

verl turns logits into per-token losses inside its engines ("logits processor") and reduces them later ("final loss").
Both halves are here, for its FSDP engines and, over shards of the vocabulary, for its Megatron engine. The teacher is
the one that verl serves: `teacher_ids` and `teacher_logprobs`, `distillation_loss.topk` of them per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from lopd_fast.losses import topk_tail_kl

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

DIVERGENCES = {
    "reverse_kl_topk_tail": "reverse_kl",
    "forward_kl_topk_tail": "forward_kl",
}  # of each loss mode
# Not verl's own "distillation_losses": its fused kernels fill that with another loss, which must not pass for this one.
LOSSES = "topk_tail_kl"


def register() -> None:
    """Makes both loss modes known to verl in this process; again is harmless. A mode of the same name is replaced.

    Every process of a run needs it, Ray's workers too: `lopd_fast.integrations.verl_plugin` is for that.

    Raises:
        ImportError: if there is no verl, or one without a registry of distillation losses.
    """
    try:
        from verl.trainer.distillation import losses  # pyright: ignore[reportMissingImports]

        theirs = losses.compute_topk_loss
        settings = losses.DistillationLossSettings(names=list(DIVERGENCES), use_topk=True)
        registries = losses.DISTILLATION_LOSS_REGISTRY, losses.DISTILLATION_SETTINGS_REGISTRY
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"no verl with distillation losses to add to ({error}): install verl>=0.9"
        ) from error
    for registry, value in zip(registries, (final_losses, settings), strict=True):
        registry.update(dict.fromkeys(DIVERGENCES, value))
    if theirs.__module__ == __name__:  # ours already
        return

    def compute_topk_loss(
        config: Any, distillation_config: Any, data: Any, student_logits: Tensor, data_format: str
    ) -> Any:
        if distillation_config.distillation_loss.loss_mode in DIVERGENCES:
            return token_losses(config, distillation_config, data, student_logits, data_format)
        return theirs(config, distillation_config, data, student_logits, data_format)

    losses.compute_topk_loss = compute_topk_loss


def token_losses(
    config: Any, distillation_config: Any, data: Any, student_logits: Tensor, data_format: str
) -> dict[str, Tensor]:
    """The logits processor: per-token divergence, and both masses on the teacher's ids, each (rows, tokens) fp32.

    Args:
        config: verl's actor config; its strategy says how tokens and vocabulary are split.
        data: the micro-batch, with nested teacher_ids and teacher_logprobs (batch, tokens, topk).
        student_logits: (rows, tokens, V) of this process, over the sampling temperature; under Megatron V is its shard.
        data_format: "thd" or "bshd".

    Raises:
        ValueError: for an engine that is not known here, or a teacher that is not aligned with the logits.
    """
    from verl.utils.tensordict_utils import get_non_tensor_data  # pyright: ignore[reportMissingImports]

    group = None
    if config.strategy in ("fsdp", "fsdp2", "veomni"):
        ids, logprobs = (_packed(data[name]) for name in ("teacher_ids", "teacher_logprobs"))
    elif config.strategy == "megatron":
        ids, logprobs = _megatron_teacher(data, student_logits, data_format)
        group = _tensor_parallel_group()
    else:
        raise ValueError(
            f"strategy {config.strategy!r} has no top-k-plus-tail loss: use fsdp, fsdp2, veomni or megatron"
        )
    if ids.shape[:2] != student_logits.shape[:2]:
        raise ValueError(
            f"teacher_ids hold {tuple(ids.shape[:2])} tokens and student_logits {tuple(student_logits.shape[:2])}: "
            "both must be split alike"
        )
    if not get_non_tensor_data(data=data, key="distillation_only", default=False):
        # The policy loss that follows overwrites these logits in place, in forward or in backward.
        student_logits = student_logits.clone()
    # Where verl has no list, or pads, it writes one id k times: no list of a teacher does.
    padding = (ids[..., 1:] == ids[..., :1]).any(-1)
    out = topk_tail_kl(
        student_logits,
        teacher_topk=(ids, logprobs),
        token_weight=(~padding).float(),
        divergence=DIVERGENCES[distillation_config.distillation_loss.loss_mode],
        process_group=group,
    )
    return {LOSSES: out.kl, "student_mass": out.student_mass, "teacher_mass": out.teacher_mass}


def _packed(teacher: Tensor) -> Tensor:
    """Nested (batch, tokens, topk) -> (1, this process's tokens, topk)."""
    from verl.utils.ulysses import (  # pyright: ignore[reportMissingImports]
        get_ulysses_sequence_parallel_world_size,
        slice_input_tensor,
    )

    teacher = teacher.values()[None]
    if get_ulysses_sequence_parallel_world_size() > 1:
        teacher = slice_input_tensor(teacher, dim=1)
    return teacher


def _megatron_teacher(data: Any, student_logits: Tensor, data_format: str) -> tuple[Tensor, Tensor]:
    """The teacher in the layout of the logits, split over the context-parallel ranks as they are."""
    from megatron.core import parallel_state  # pyright: ignore[reportMissingImports]
    from verl.models.mcore import util  # pyright: ignore[reportMissingImports]

    if data_format == "thd":
        layout, options = util.preprocess_thd_engine, {}
    else:
        context = parallel_state.get_context_parallel_world_size()
        layout = util.preprocess_bshd_engine
        options = {"forced_max_seqlen": student_logits.shape[1] * context if context > 1 else None}
    ids, *_ = layout(data["teacher_ids"], pre_process=True, **options)
    logprobs, *_ = layout(data["teacher_logprobs"], pre_process=True, **options)
    return ids, logprobs


def _tensor_parallel_group() -> ProcessGroup | None:
    from megatron.core import parallel_state  # pyright: ignore[reportMissingImports]

    if parallel_state.get_tensor_model_parallel_world_size() == 1:
        return None
    return parallel_state.get_tensor_model_parallel_group()


def final_losses(
    config: Any, distillation_config: Any, model_output: Any, data: Any
) -> tuple[Tensor, dict[str, Any]]:
    """What verl reduces to the loss: the response's divergences (batch, longest response), and metrics of the masses.

    Raises:
        ValueError: if the losses were not made by `token_losses`.
    """
    from verl.utils.metric import Metric  # pyright: ignore[reportMissingImports]
    from verl.workers.utils.padding import no_padding_2_padding  # pyright: ignore[reportMissingImports]

    if LOSSES not in model_output:
        mode = distillation_config.distillation_loss.loss_mode
        raise ValueError(
            f"loss_mode={mode} was not computed, for verl's fused kernels or its engine make no logits: "
            "set use_fused_kernels=False"
        )
    losses = no_padding_2_padding(model_output[LOSSES], data)
    mask = data["response_mask"]
    mask = mask.bool().to_padded_tensor(False) if mask.is_nested else mask.bool()
    metrics: dict[str, Any] = {}
    for name in ("student_mass", "teacher_mass"):
        mass = no_padding_2_padding(model_output[name], data)[mask]
        metrics[f"distillation/{name}"] = mass.mean().item()
        metrics[f"distillation/{name}_min"] = Metric("min", mass.min())
        metrics[f"distillation/{name}_max"] = Metric("max", mass.max())
    return losses, metrics
