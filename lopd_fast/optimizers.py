"""AdamW over the parts that learn, each with its own learning rate, and the schedule over steps."""

import importlib.util
from collections.abc import Sequence

import torch
from torch import nn

from lopd_fast.composer import Composer
from lopd_fast.config import OptimConfig
from lopd_fast.errors import UserError


def adamw(config: OptimConfig, groups: Sequence[tuple[list[nn.Parameter], float]]) -> torch.optim.Optimizer:
    """AdamW of the configured kind over (parameters, learning rate) groups.

    adamw keeps its two moments in fp32, 8 bytes a parameter. adamw8bit (Dettmers et al., arXiv 2110.02861) keeps them
    in blocks of 256 with 8 bits each, 2.03 bytes a parameter; tensors of fewer than 4,096 elements stay in fp32.
    paged_adamw8bit lets CUDA move them to the host's memory where the device's is short.

    Raises:
        UserError: the package that an 8-bit kind needs is missing.
    """
    rows = [{"params": parameters, "lr": lr, "base_lr": lr} for parameters, lr in groups]
    if config.kind == "adamw":
        kind: type[torch.optim.Optimizer] = torch.optim.AdamW
    else:
        check_installed(config)
        from bitsandbytes.optim.adamw import AdamW8bit, PagedAdamW8bit

        kind = {"adamw8bit": AdamW8bit, "paged_adamw8bit": PagedAdamW8bit}[config.kind]
    return kind(rows, betas=(0.9, 0.999), weight_decay=config.weight_decay)  # pyright: ignore[reportCallIssue]


def check_installed(config: OptimConfig) -> None:
    """Raise UserError where the configured kind needs a package that is missing; nothing is imported."""
    if config.kind != "adamw" and importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(
            f"optim.kind={config.kind} needs the package bitsandbytes: `pip install bitsandbytes`, or take "
            "optim.kind=adamw."
        )


def composer_optimizer(composer: Composer, config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW over phi; encoder LoRA and QFormer may have their own learning rates."""
    parts = composer.trainable()
    rates = {"encoder": config.encoder_lr or config.lr, "qformer": config.qformer_lr or config.lr}
    return adamw(config, [([parameter for _, parameter in parts[name]], rates[name]) for name in parts])


def schedule_factor(config: OptimConfig, step: int, steps: int) -> float:
    """Factor of the learning rates at `step` (from 0) of `steps`: linear warm-up, constant, linear decay to 0."""
    warm = min(1.0, (step + 1) / (config.warmup_steps + 1))
    left = 1.0 - step / steps
    return warm * min(1.0, left / config.decay_share) if config.decay_share else warm


def optimizer_step(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """One step at `factor` times each group's own learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor
    optimizer.step()
