"""Latent On-Policy Self-Distillation, and the fused top-k-plus-tail divergence it trains with.

Public names load on first use, so ``import lopd_fast`` alone brings in neither torch, transformers nor triton.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# public name -> the module that defines it
_HOME = {
    "UserError": "errors",
    "TopKTailKL": "losses",
    "topk_tail_kl": "losses",
    "fused_linear_topk_tail_kl": "losses",
    "TopKTailKLLoss": "loss_modules",
    "FusedLinearTopKTailKLLoss": "loss_modules",
    "served_topk": "served",
}

__all__ = ["__version__", *_HOME]  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from lopd_fast.errors import UserError as UserError
    from lopd_fast.loss_modules import FusedLinearTopKTailKLLoss as FusedLinearTopKTailKLLoss
    from lopd_fast.loss_modules import TopKTailKLLoss as TopKTailKLLoss
    from lopd_fast.losses import TopKTailKL as TopKTailKL
    from lopd_fast.losses import fused_linear_topk_tail_kl as fused_linear_topk_tail_kl
    from lopd_fast.losses import topk_tail_kl as topk_tail_kl
    from lopd_fast.served import served_topk as served_topk


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
