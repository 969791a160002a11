"""What a model's output head is given, without what it makes of it.

A model is run as it always is (wrapped, with adapters, with images), but its head answers with the logits of id 0 alone
and hands over its input. So the hidden states are those that the model itself would have projected, on every
architecture, and the logits of the whole vocabulary never exist.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lopd_fast.fused_head import Projection

TOLERANCE = 4.0  # roundings of the largest logit by which a model may differ from its config's formula


@dataclass(frozen=True)
class HeadInput:
    """One side of a divergence ahead of its logits = softcap(scale * (hidden W^T + bias))."""

    hidden: Tensor  # (B, T, H)
    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    projection: Projection

    def at(self, take: Callable[[Tensor], Tensor]) -> HeadInput:
        """With `take` applied to the hidden states, to choose or shift positions."""
        return replace(self, hidden=take(self.hidden))


def projection_of(config: Any) -> Projection:
    """The scale and the soft-cap of a model's logits, by the names under which the families keep them.

    Cohere multiplies by logit_scale, Falcon-H1 by lm_head_multiplier, others by output_multiplier; Granite and MiniCPM3
    divide by logits_scaling, by which HyperCLOVA X multiplies; Gemma caps at final_logit_softcapping.
    """
    config = config.get_text_config()
    scale = 1.0
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling"):
        value = getattr(config, name, None)
        if value is not None:
            divides = name == "logits_scaling" and config.model_type != "hyperclovax"
            scale = 1 / float(value) if divides else float(value)
            break
    return Projection(scale, getattr(config, "final_logit_softcapping", None))


def linears_of(model: nn.Module, side: str) -> list[nn.Linear]:
    """The linear layers that may act as the head; several where PEFT keeps a trained copy beside the original.

    Raises:
        ValueError: for a head that is more than its weight and bias, by name.
    """
    head = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    if head is None:
        raise ValueError(
            f"the {side} {type(model).__name__} has no output head, so there is no loss to fuse it with"
        )
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    for module in head.modules():
        if tuners is not None and isinstance(module, tuners.BaseTunerLayer):
            raise ValueError(
                f"the {side}'s output head carries a PEFT adapter ({type(module).__name__}), which a fused loss would "
                "not see: leave the head out of target_modules, or train all of it through modules_to_save"
            )
    linears = [module for module in head.modules() if type(module).forward is nn.Linear.forward]
    if not linears:
        raise ValueError(
            f"the {side}'s output head is a {type(head).__name__}: a fused loss needs a plain nn.Linear"
        )
    for linear in linears:
        weight: Any = linear.weight
        tensors = sys.modules.get("torch.distributed.tensor")
        if tensors is not None and isinstance(weight, tensors.DTensor):
            raise ValueError(
                f"the {side}'s output head is sharded (a DTensor): gather it, or keep it out of the plan"
            )
        if weight.is_meta or weight.numel() == 0 or not weight.is_floating_point():
            raise ValueError(
                f"the {side}'s output head has a weight of {weight.dtype} on {weight.device} with {weight.numel()} "
                "numbers: a fused loss needs it whole, in floating point and on its device"
            )
    return linears


@dataclass(frozen=True)
class _Call:
    """One call of a head."""

    linear: nn.Linear
    hidden: Tensor  # (B, T, H)
    answer: Tensor  # (B, T, V), or (B, T, 1) of id 0


@contextmanager
def _noting(linears: list[nn.Linear], whole: bool) -> Iterator[list[_Call]]:
    """Within, each call of a head is noted; it projects to all ids if `whole`, else to the first alone."""
    calls: list[_Call] = []

    def noted(linear: nn.Linear) -> Callable[[Tensor], Tensor]:
        usual = linear.forward

        def forward(input: Tensor) -> Tensor:
            if whole:
                answer = usual(input)
            else:
                # A real logit: data-parallel wrappers look in the outputs for the parameters that were used.
                bias = None if linear.bias is None else linear.bias[:1]
                input = input.to(linear.weight.device)
                answer = nn.functional.linear(input, linear.weight[:1], bias)
            calls.append(_Call(linear, input, answer))
            return answer

        return forward

    before = [linear.__dict__.get("forward") for linear in linears]
    for linear in linears:
        linear.forward = noted(linear)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield calls
    finally:
        for linear, forward in zip(linears, before, strict=True):
            if forward is None:
                del linear.forward
            else:
                linear.forward = forward


def _only(calls: list[_Call], model: nn.Module, side: str) -> _Call:
    if len(calls) != 1:
        raise ValueError(
            f"the {side} {type(model).__name__} called its output head {len(calls)} times in one forward: a fused loss "
            "needs exactly one call"
        )
    return calls[0]


def head_input(model: nn.Module, side: str, forward: Callable[[], Any]) -> HeadInput:
    """What the head of `model`, unwrapped, is given while `forward` runs it once, wrapped or not.

    The weight is detached where autograd is off: a teacher may be the student itself.
    """
    with _noting(linears_of(model, side), whole=False) as calls:
        forward()
    call = _only(calls, model, side)
    weight, bias = call.linear.weight, call.linear.bias
    if not torch.is_grad_enabled():
        weight, bias = weight.detach(), None if bias is None else bias.detach()
    config = model.config  # pyright: ignore[reportAttributeAccessIssue]
    return HeadInput(call.hidden, weight, bias, projection_of(config))


@torch.no_grad()
def check_head(model: nn.Module, side: str) -> None:
    """Compare, on two tokens, a model's logits with its head's answer after the scale and soft-cap of its config.

    Raises:
        ValueError: if they differ, so that an architecture with more behind its head is not trained wrongly.
    """
    device = model.get_input_embeddings().weight.device  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    ids = torch.zeros(1, 2, dtype=torch.long, device=device)
    with torch.random.fork_rng(), _noting(linears_of(model, side), whole=True) as calls:
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    answer = _only(calls, model, side).answer
    config = model.config  # pyright: ignore[reportAttributeAccessIssue]
    projection = projection_of(config)
    expected = answer.float() * projection.logit_scale
    if projection.logit_softcap is not None:
        expected = projection.logit_softcap * torch.tanh(expected / projection.logit_softcap)
    unit = torch.finfo(answer.dtype).eps * expected.abs().max()
    if logits.shape != expected.shape or (logits.float() - expected).abs().max() > TOLERANCE * unit:
        raise ValueError(
            f"the logits of the {side} {type(model).__name__} are not softcap(scale * (hidden W^T + bias)) with the "
            f"scale {projection.logit_scale:g} and soft-cap {projection.logit_softcap} of its config, so no fused loss "
            "can stand in for them"
        )
