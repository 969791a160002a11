"""The methods of TRL's trainers that a fused loss replaces, each with the signature and the result of TRL's own.

Batches, masks, shifts, the teacher's context and the reductions stay TRL's. Everything here is a function whose first
argument is the trainer, for `use_fused_loss` to bind.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lopd_fast.fused_head import Projection
from lopd_fast.integrations.trl.full_vocabulary import full_divergence, label_logprobs
from lopd_fast.integrations.trl.heads import HeadInput, head_input
from lopd_fast.losses import fused_linear_topk_tail_kl

# Functions of TRL's modules that are exchanged while a method of theirs runs.
CHUNKED_LOSS = "_chunked_divergence_loss"
LOG_SOFTMAX = "selective_log_softmax"


def divergence_of(weight: float) -> str:
    """TRL's beta or alpha: 0 is the forward KL, 1 the reverse KL, and what lies between the generalised JSD."""
    return {0.0: "forward_kl", 1.0: "reverse_kl"}.get(float(weight), "jsd")


@contextmanager
def exchanged(module: Any, name: str, value: Any) -> Iterator[None]:
    """Within, `module` has another value under `name`."""
    usual = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, usual)


# SDPO and SDFT: what they call logits are head inputs from here on.


def forward_logits(
    trainer: Any, model: nn.Module, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int
) -> HeadInput:
    """In place of `_forward_logits`: the head's input at the completion's tokens. The temperature comes later."""
    unwrapped = trainer.accelerator.unwrap_model(model)
    usual = type(trainer)._forward_logits
    head = head_input(
        unwrapped,
        "model",
        lambda: usual(trainer, model, input_ids, attention_mask, logits_to_keep),
    )
    return head.at(lambda hidden: hidden[:, :-1][:, -logits_to_keep:])


def rollout_logps(trainer: Any, *args: Any, **kwargs: Any) -> Tensor | None:
    """In place of `_compute_rollout_logps`: TRL's own, with its log-softmax exchanged while it runs."""

    def log_softmax(head: HeadInput, labels: Tensor) -> Tensor:
        with trainer.accelerator.autocast():
            return label_logprobs(head, labels, trainer.temperature)

    usual = type(trainer)._compute_rollout_logps
    with exchanged(sys.modules[usual.__module__], LOG_SOFTMAX, log_softmax):
        return usual(trainer, *args, **kwargs)


def self_distillation_loss(
    trainer: Any, model: nn.Module, inputs: dict[str, Any], distillation: Any
) -> Tensor:
    """In place of `_compute_self_distillation_loss`: the mean over sequences of each one's mean over tokens."""
    args, temperature = trainer.args, trainer.temperature
    student: HeadInput = distillation.student_logits
    teacher: HeadInput = distillation.teacher_logits
    mask = distillation.loss_mask.float()
    weight = mask / mask.sum(-1, keepdim=True).clamp(min=1.0) / len(mask)
    with trainer.accelerator.autocast():
        ratio = _clipped_ratio(trainer, inputs, student, distillation.completion_ids)
        if ratio is not None:
            weight = weight * ratio
        divergence, beta = divergence_of(args.distillation_alpha), args.distillation_alpha
        if args.distillation_mode == "topk_logits":
            result = fused_linear_topk_tail_kl(
                student.hidden,
                student.weight,
                teacher.hidden,
                teacher.weight,
                student_bias=student.bias,
                teacher_bias=teacher.bias,
                token_weight=weight,
                k=args.distillation_topk,
                support="student",
                divergence=divergence,
                beta=beta,
                tail="bucket" if args.distillation_add_tail else "renormalize",
                temperature=temperature,
                num_items=1,
                logit_scale=student.projection.logit_scale,
                logit_softcap=student.projection.logit_softcap,
            )
            masses = {"student": result.student_mass, "teacher": result.teacher_mass}
        else:
            result = full_divergence(
                student,
                teacher,
                token_weight=weight,
                divergence=divergence,
                beta=beta,
                temperature=temperature,
            )
            masses = {}

    mode = "train" if model.training else "eval"
    count = mask.sum().clamp(min=1.0)
    per_token = result.kl.detach() if ratio is None else result.kl.detach() * ratio
    mean = trainer.accelerator.gather((per_token * mask).sum() / count).mean()
    trainer._log_self_distillation_metric(mode, mean.item())
    for side, mass in masses.items():
        mean = trainer.accelerator.gather((mass * mask).sum() / count).mean()
        trainer._metrics[mode][f"self_distillation/{side}_topk_mass"].append(mean.item())
    return result.loss


def _clipped_ratio(trainer: Any, inputs: dict[str, Any], student: HeadInput, ids: Tensor) -> Tensor | None:
    """TRL's importance ratio (B, T), a constant, where a batch is used after its student has moved on."""
    old, clip = inputs.get("old_per_token_logps"), trainer.args.distillation_is_clip
    if clip is None or old is None:
        return None
    moved = label_logprobs(student, ids, trainer.temperature) - old
    return moved.clamp(-20.0, 20.0).exp().clamp(max=clip)


# DistillationTrainer: it has the hidden states, and one function of its module makes the loss of them.


def distillation_loss(trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of `_compute_loss`: TRL's own, with its chunked loss exchanged while it runs."""
    usual = type(trainer)._compute_loss
    with exchanged(sys.modules[usual.__module__], CHUNKED_LOSS, chunked_divergence_loss):
        return usual(trainer, *args, **kwargs)


def chunked_divergence_loss(
    student_hidden_states: Tensor,
    teacher_hidden_states: Tensor,
    student_lm_head_weight: Tensor,
    teacher_lm_head_weight: Tensor,
    completion_mask: Tensor,
    beta: float,
    num_items_in_batch: Tensor | int | None = None,
    student_lm_head_bias: Tensor | None = None,
    teacher_lm_head_bias: Tensor | None = None,
    student_logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    student_final_logit_softcapping: float | None = None,
    teacher_final_logit_softcapping: float | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """In place of TRL's function of that name: the loss, the sum of the student's entropies and the tokens."""
    mask = (completion_mask != 0).float()
    student = HeadInput(
        student_hidden_states,
        student_lm_head_weight,
        student_lm_head_bias,
        Projection(student_logit_scale, student_final_logit_softcapping),
    )
    teacher = HeadInput(
        teacher_hidden_states,
        teacher_lm_head_weight.detach(),
        None if teacher_lm_head_bias is None else teacher_lm_head_bias.detach(),
        Projection(teacher_logit_scale, teacher_final_logit_softcapping),
    )
    result = full_divergence(
        student,
        teacher,
        token_weight=mask / _items(mask, num_items_in_batch),
        divergence=divergence_of(beta),
        beta=beta,
        temperature=temperature,
    )
    return result.loss, result.entropy.sum(), mask.sum().long()


def _items(mask: Tensor, num_items: Tensor | int | None) -> Tensor | int:
    """What the sum over tokens is divided by: the tokens of the whole batch, else those at hand."""
    if num_items is None:
        return mask.sum().clamp(min=1.0)
    return num_items.to(mask.device) if isinstance(num_items, Tensor) else num_items


# GKDTrainer


def gkd_loss(
    trainer: Any,
    model: nn.Module,
    inputs: dict[str, Any],
    return_outputs: bool = False,
    num_items_in_batch: Tensor | int | None = None,
) -> Any:
    """In place of `compute_loss`. Asked for outputs, as an evaluation with metrics does, it is TRL's own: they hold the
    logits."""
    if return_outputs:
        return type(trainer).compute_loss(trainer, model, inputs, True, num_items_in_batch)

    def shifted(model: nn.Module, side: str) -> HeadInput:
        fields = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        head = head_input(trainer.accelerator.unwrap_model(model), side, lambda: model(**fields))
        return head.at(lambda hidden: hidden[:, :-1])

    student = shifted(model, "student")
    trainer.teacher_model.eval()
    with torch.no_grad():
        teacher = shifted(trainer.teacher_model, "teacher")
    mask = (inputs["labels"][:, 1:] != -100).float().to(student.hidden.device)
    with trainer.accelerator.autocast():
        return full_divergence(
            student,
            teacher,
            token_weight=mask / _items(mask, num_items_in_batch),
            divergence=divergence_of(trainer.beta),
            beta=trainer.beta,
        ).loss
