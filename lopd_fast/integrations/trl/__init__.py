"""TRL's distillation trainers with the fused loss: the same numbers, without the logits.

    trainer = SDFTTrainer(...)
    use_fused_loss(trainer)              # from here on
    with use_fused_loss(trainer):        # or inside the block alone
        trainer.train()

| trainer                               | loss                                                                        |
|---------------------------------------|-----------------------------------------------------------------------------|
| SDPOTrainer, SDFTTrainer, topk_logits | `fused_linear_topk_tail_kl` on the student's top-k                           |
| SDPOTrainer, SDFTTrainer, full_logits | `full_vocabulary.full_divergence`, exact                                     |
| DistillationTrainer, GKDTrainer       | `full_vocabulary.full_divergence`, exact                                     |
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import MethodType
from typing import Any

from packaging.version import Version

from lopd_fast.integrations.trl import methods
from lopd_fast.integrations.trl.heads import check_head, projection_of

OLDEST = "1.16"

_SELF_DISTILLATION: dict[str, Callable[..., Any]] = {
    "_forward_logits": methods.forward_logits,
    "_compute_rollout_logps": methods.rollout_logps,
    "_compute_self_distillation_loss": methods.self_distillation_loss,
}
# Class -> what is replaced. Looked up by name, so that no trainer is imported that is not in use.
_REPLACED: dict[str, dict[str, Callable[..., Any]]] = {
    "trl.experimental.sdpo.sdpo_trainer.SDPOTrainer": _SELF_DISTILLATION,
    "trl.experimental.sdft.sdft_trainer.SDFTTrainer": _SELF_DISTILLATION,
    "trl.trainer.distillation_trainer.DistillationTrainer": {"_compute_loss": methods.distillation_loss},
    "trl.experimental.gkd.gkd_trainer.GKDTrainer": {"compute_loss": methods.gkd_loss},
}


class FusedLoss:
    """A trainer with the fused loss on; `undo`, or leaving a `with` block, gives it back TRL's own."""

    def __init__(self, trainer: Any, replaced: dict[str, Callable[..., Any]]) -> None:
        self._trainer, self._names = trainer, list(replaced)
        for name, function in replaced.items():
            setattr(trainer, name, MethodType(function, trainer))

    def undo(self) -> None:
        """Give the trainer back its own methods; a second time does nothing."""
        for name in self._names:
            delattr(self._trainer, name)
        self._names = []

    def __enter__(self) -> FusedLoss:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def use_fused_loss(trainer: Any) -> FusedLoss:
    """Make a TRL trainer compute its loss from hidden states, a chunk of tokens at a time.

    Args:
        trainer: a DistillationTrainer, SDPOTrainer, SDFTTrainer or GKDTrainer of TRL 1.16 or newer, before or between
            calls of `train`. Only this object changes; its class and other trainers stay as they are.

    Returns:
        FusedLoss, which undoes it. Loss, gradients, reductions and metrics are those of the trainer. Two things differ,
        where TRL is the less exact: the tail bucket of SDPO and SDFT has no floor at 1e-7, and the logits of
        half-precision heads are not rounded to half precision. SDPO and SDFT log two metrics more,
        self_distillation/student_topk_mass and teacher_topk_mass.

    Raises:
        TypeError: for any other object.
        ValueError: for what cannot be the same, naming it: another objective (sampled_token, a policy loss mixed in, a
            teacher behind a server), a subclass with a loss of its own, an adapter on the head, a head that is sharded,
            quantised or offloaded, an architecture whose logits are more than scale and soft-cap, torch.compile.
    """
    base = next(
        (c for c in type(trainer).__mro__ if f"{c.__module__}.{c.__qualname__}" in _REPLACED),
        None,
    )
    if base is None:
        raise TypeError(
            f"use_fused_loss takes TRL's DistillationTrainer, SDPOTrainer, SDFTTrainer or GKDTrainer, not "
            f"{type(trainer).__name__}"
        )
    replaced = _REPLACED[f"{base.__module__}.{base.__qualname__}"]
    _check_trainer(trainer, base, replaced)
    _check_parallelism(trainer)
    if replaced is _SELF_DISTILLATION:
        _check_self_distillation(trainer)
    unwrap = trainer.accelerator.unwrap_model
    student, teacher = unwrap(trainer.model), unwrap(trainer.teacher_model)
    check_head(student, "student")
    if teacher is not student:
        check_head(teacher, "teacher")
    return FusedLoss(trainer, replaced)


def _check_trainer(trainer: Any, base: type, replaced: dict[str, Callable[..., Any]]) -> None:
    """That the methods to be replaced are TRL's, and those that this version was made for."""
    import trl

    if Version(trl.__version__) < Version(OLDEST):
        raise ValueError(f"use_fused_loss needs TRL {OLDEST} or newer, and this is {trl.__version__}")
    for name in replaced:
        if name in vars(trainer):
            raise ValueError(f"the trainer's {name} is replaced already: undo that before use_fused_loss")
        usual = getattr(base, name, None)
        if usual is None:
            raise ValueError(
                f"TRL {trl.__version__} has no {base.__name__}.{name}, which use_fused_loss replaces"
            )
        if getattr(type(trainer), name) is not usual:
            raise ValueError(
                f"{type(trainer).__name__} has a {name} of its own, which use_fused_loss would replace: it knows only "
                f"{base.__name__}'s"
            )
    exchanged = {"_compute_loss": methods.CHUNKED_LOSS, "_compute_rollout_logps": methods.LOG_SOFTMAX}
    for method, function in exchanged.items():
        if method in replaced and not hasattr(sys.modules[base.__module__], function):
            raise ValueError(
                f"TRL {trl.__version__} has no {base.__module__}.{function}, which is to be replaced"
            )
    if trainer.teacher_model is None:
        raise ValueError(f"this {type(trainer).__name__} has no teacher_model: the loss needs a local one")


def _check_parallelism(trainer: Any) -> None:
    """That every process holds the whole head where the loss reads it."""
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    if is_deepspeed_zero3_enabled():
        raise ValueError(
            "DeepSpeed ZeRO-3 shards the output head, which a fused loss reads whole: use stage 2 or below"
        )
    if trainer.is_fsdp_enabled:
        raise ValueError("FSDP shards the output head, which a fused loss reads whole: use DDP or ZeRO-2")
    if trainer.args.n_gpu > 1:
        raise ValueError(
            "nn.DataParallel copies the model at each step: launch one process per device instead"
        )
    if trainer.args.torch_compile:
        raise ValueError(
            "torch_compile would freeze the head's call, which a fused loss intercepts: leave it off"
        )


def _check_self_distillation(trainer: Any) -> None:
    """That the objective is a divergence between two local models."""
    args, name = trainer.args, type(trainer).__name__
    if trainer.use_teacher_server:
        raise ValueError(
            f"{name} takes its teacher from a server (use_teacher_server): the fused loss needs a local one"
        )
    if args.distillation_mode not in ("topk_logits", "full_logits"):
        raise ValueError(
            f"distillation_mode={args.distillation_mode!r} is no divergence over a support: use_fused_loss takes "
            "'topk_logits' and 'full_logits'"
        )
    if args.distillation_mode == "topk_logits" and args.distillation_topk is None:
        raise ValueError("distillation_mode='topk_logits' needs distillation_topk")
    if getattr(args, "distillation_weight", 1.0) != 1.0:
        raise ValueError(
            f"distillation_weight={args.distillation_weight:g} mixes in a policy loss, which needs the logits: "
            "use_fused_loss takes 1.0"
        )
    unwrap = trainer.accelerator.unwrap_model
    student, teacher = (
        projection_of(unwrap(model).config) for model in (trainer.model, trainer.teacher_model)
    )
    if student != teacher:
        raise ValueError(
            f"student and teacher differ in how they scale their logits: {student} and {teacher}"
        )
