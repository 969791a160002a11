"""Liger's kernels for the RMSNorm, rotary embedding and SwiGLU of a model on CUDA, where liger-kernel is installed.

Its patches of head and loss stay off: the head's loss is ours. Liger also replaces names in the module that defines
the architecture; they are put back, so that other models of it, on a CPU perhaps, stay as they were. The rotary
embedding is a function there, which no instance holds: it goes to Liger's for tensors on CUDA alone.
"""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakSet

from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.liger import apply_liger_kernel
from transformers.utils.import_utils import is_liger_kernel_available

DEVICES = ("cuda",)  # that Liger's kernels run on
OFF = {"cross_entropy": False, "fused_linear_cross_entropy": False}
ROTARY = "apply_rotary_pos_emb"

_patched: WeakSet[PreTrainedModel] = WeakSet()


def use_liger(model: PreTrainedModel) -> None:
    """Patch `model` if it is on CUDA, and liger-kernel is there and knows it; its parameters stay as they are."""
    if model.device.type not in DEVICES or not is_liger_kernel_available():
        return
    architecture = sys.modules[type(model).__module__]
    before = dict(vars(architecture))
    apply_liger_kernel(model, OFF)
    replaced = {name: new for name, new in vars(architecture).items() if new is not before.get(name)}
    for name, new in replaced.items():
        rotary = name == ROTARY and not hasattr(before[name], "on_device")
        setattr(architecture, name, _by_device(new, before[name]) if rotary else before[name])
    if replaced:
        _patched.add(model)


def uses_liger(model: PreTrainedModel) -> bool:
    """Whether `use_liger` patched it."""
    return model in _patched


def _by_device(on_device: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def apply_rotary_pos_emb(q: Tensor, *rest: Any, **named: Any) -> Any:
        return (on_device if q.device.type in DEVICES else plain)(q, *rest, **named)

    apply_rotary_pos_emb.on_device = on_device  # pyright: ignore[reportAttributeAccessIssue]
    return apply_rotary_pos_emb
