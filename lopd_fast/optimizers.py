"""AdamW over the parts that learn, each with its own learning rate, and the schedule over steps."""

from collections.abc import Sequence

import torch
from torch import nn

from lopd_fast.composer import Composer
from lopd_fast.config import OptimConfig


def adamw(config: OptimConfig, groups: Sequence[tuple[list[nn.Parameter], float]]) -> torch.optim.AdamW:
    """AdamW over (parameters, learning rate) groups."""
    rows = [{"params": parameters, "lr": lr, "base_lr": lr} for parameters, lr in groups]
    return torch.optim.AdamW(rows, betas=(0.9, 0.999), weight_decay=config.weight_decay)


def composer_optimizer(composer: Composer, config: OptimConfig) -> torch.optim.AdamW:
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
