"""Privileged margin, dual variable and anchor: L_distill + beta (m - Delta) + lambda ||c_phi - sg[c_phi0]||^2."""

from collections.abc import Sequence

from torch import Tensor


def dual_update(beta: float, delta: float, margin: float, dual_lr: float) -> float:
    """Projected dual ascent: beta <- max(0, beta + dual_lr (m - Delta))."""
    return max(0.0, beta + dual_lr * (margin - delta))


def anchor_sum(latents: Sequence[Tensor], anchors: Sequence[Tensor]) -> Tensor:
    """Sum of squares of c_phi - sg[c_phi0] over a micro-batch; divided by the step's count it is the mean square."""
    differences = [(latent - anchor).pow(2).sum() for latent, anchor in zip(latents, anchors, strict=True)]
    return sum(differences[1:], start=differences[0])
