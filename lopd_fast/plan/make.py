"""Peak memory of a step by phase and part, what fits, and the time of a step; and one sentence where nothing fits.

How: the real step runs on the meta device (`probe`) under an account of every storage (`ledger`), so the plan follows
the code that trains. A plan is for the longest rollout in every row, since that is what a run must survive. It counts
tensors. What a device holds beside them is the share of its memory that `Device.usable` leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PretrainedConfig

from lopd_fast.backbone import pick_device, pick_dtype
from lopd_fast.config import Config
from lopd_fast.errors import UserError
from lopd_fast.plan.devices import GB, Device, this_device
from lopd_fast.plan.ledger import Phase
from lopd_fast.plan.load import Load, load_of
from lopd_fast.plan.models import model_of
from lopd_fast.plan.probe import Probe

SAMPLING = ("prefill", "decode")


@dataclass
class Plan:
    """The account of one step at its fullest, and what it is held against."""

    config: Config
    model: PretrainedConfig
    device: Device
    load: Load
    phases: dict[str, Phase]  # sampling first, then cold start if there is one, then those of an update
    # Tokens for which everything fits, along a line through the load and one half as long; 0 in a brief plan:
    longest_rollout: int = 0
    largest_micro_batch: int = 0
    seconds: dict[str, float] = field(default_factory=dict)  # of a step of longest rollouts, by phase

    @property
    def peak(self) -> float:
        """Bytes at the highest moment of the step."""
        return max(phase.peak for phase in self.phases.values())

    @property
    def fits(self) -> bool:
        """Whether every phase stays within the usable memory."""
        return self.peak <= self.device.usable

    def as_dict(self) -> dict[str, Any]:
        """The plan as plain numbers: bytes, tokens, FLOPs and seconds."""
        phases = {
            name: {"peak_bytes": round(phase.peak), "parts": phase.parts, "flops": phase.flops}
            for name, phase in self.phases.items()
        }
        return {
            "fits": self.fits,
            "device": self.device.name,
            "usable_bytes": self.device.usable,
            "peak_bytes": round(self.peak),
            "phases": phases,
            "longest_rollout": self.longest_rollout,
            "largest_micro_batch": self.largest_micro_batch,
            "estimated_seconds": self.seconds,
        }


def make_plan(
    config: Config,
    load: Load,
    model: PretrainedConfig,
    device: Device,
    dtype: torch.dtype,
    *,
    brief: bool = False,
) -> Plan:
    """The plan of a run of `config` on `device`; see the module.

    Raises:
        UserError: the run samples with vLLM, whose memory is not accounted for here.

    Args:
        load: what a step holds at once; `load.load_of` tells it for a configuration.
        model: as `models.model_of` or `models.named_model` gives it; its weights are never read.
        dtype: of the backbone.
        brief: leave out limits and times if the run fits, at half the work.
    """
    if config.rollout.engine == "vllm":
        raise UserError(
            "There is no plan for rollout.engine=vllm: vLLM takes rollout.vllm_memory of the GPU while it "
            "samples, and less asleep. Plan the training phases with rollout.engine=hf."
        )
    probe = Probe(config, model, dtype, device.seconds, cuda=device.cuda)

    def phases(load: Load) -> dict[str, Phase]:
        cold = probe.cold_start(load) if config.cold_start.steps and load.latents else {}
        return probe.sample(load) | cold | probe.step(load)

    plan = Plan(config, model, device, load, phases(load))
    if not (brief and plan.fits):
        shorter = replace(
            load,
            tokens=load.tokens - load.response // 2,
            response=-(-load.response // 2),
            turn=-(-load.turn // 2),
        )
        half = phases(shorter)
        plan.longest_rollout = _most(plan, shorter, half)
        updates = {name: phase for name, phase in half.items() if name not in SAMPLING}
        plan.largest_micro_batch = load.rollouts * _most(plan, shorter, updates)
        plan.seconds = _seconds(load, plan.phases, half)
    return plan


def refuse_too_large(config: Config) -> None:
    """Plan the run on the CUDA device that it would take, before anything loads; on a CPU do nothing.

    Nothing is planned for vLLM either: it takes its share at its own start, and says if that is not free.

    Raises:
        UserError: a step at its fullest does not fit into the memory that is free there now.
    """
    device = pick_device(config.model.device)
    if device.type != "cuda" or config.rollout.engine == "vllm":
        return
    dtype = pick_dtype(config.model.dtype, device)
    plan = make_plan(config, load_of(config), model_of(config.model), this_device(device), dtype, brief=True)
    if not plan.fits:
        raise UserError(advice(plan))


def advice(plan: Plan) -> str:
    """One sentence on a plan that does not fit: what is too large, its rows and vocabulary, what to lower."""
    load, config = plan.load, plan.config
    name, phase = max(plan.phases.items(), key=lambda item: item[1].peak)
    largest = sorted(phase.parts.items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{part} {size / GB:.3g}" for part, size in largest)
    large = {name for name, phase in plan.phases.items() if phase.peak > plan.device.usable}
    steps = []
    if large & set(SAMPLING) and load.sampled > 1:
        steps.append(f"lower rollout.batch_size below {load.sampled}")
    if load.tokens > plan.longest_rollout > load.tokens - load.response:
        steps.append(f"lower rollout.max_tokens to {plan.longest_rollout}")
    if large - set(SAMPLING):
        if load.rollouts > 1:
            steps.append(f"lower train.micro_batch_tokens below {load.rollouts * load.tokens}")
        if not config.model.gradient_checkpointing:
            steps.append("set model.gradient_checkpointing=true")
        if load.latents and load.memory > 1024:
            steps.append(f"lower composer.max_memory_tokens below {load.memory}")
    if config.student.mode == "full":
        steps.append("set student.mode=lora")
    elif config.rollout.merge_lora:
        steps.append("set rollout.merge_lora=false")
    remedy = ", or ".join(steps) or "take a smaller model or a device with more memory"
    return (
        f"This run does not fit: {name} takes {phase.peak / GB:.3g} GB at its peak ({parts}) and "
        f"{plan.device.usable / GB:.3g} of the {plan.device.bytes / GB:.3g} GB of {plan.device.name} can be used, for "
        f"rollouts of {load.tokens} tokens, {load.sampled} sampled at a time, micro-batches of {load.rollouts} and a "
        f"vocabulary of {plan.model.get_text_config().vocab_size}; {remedy}."
    )


def _most(plan: Plan, shorter: Load, half: Mapping[str, Phase]) -> int:
    """Tokens of a rollout at which the first of the phases in `half` would fill the memory."""
    found = []
    for name, before in half.items():
        now = plan.phases[name].peak
        slope = (now - before.peak) / (plan.load.tokens - shorter.tokens)
        if slope > 0:
            found.append(plan.load.tokens + (plan.device.usable - now) / slope)
    return max(0, int(min(found, default=0)))


def _seconds(load: Load, phases: Mapping[str, Phase], half: Mapping[str, Phase]) -> dict[str, float]:
    """Seconds of a step by phase. A token costs what one halfway costs; so does the prompt of one turn of several."""
    turns = -(-load.response // load.turn)
    times = dict.fromkeys(phases, load.micro_batches) | {"optimizers": 1}
    seconds = {name: times[name] * phases[name].seconds for name in phases if name != "cold start"}
    seconds["prefill"] = load.batches * turns * (phases if turns == 1 else half)["prefill"].seconds
    seconds["decode"] = load.batches * load.response * (phases["decode"].seconds + half["decode"].seconds) / 2
    return seconds
