"""The backbone, loaded once and frozen, in every role: teacher (no adapter), student, encoder, anchor (one LoRA each).

Roles are switched on the LoRA layers; which parameters learn never changes with the role, and a checkpointed
backward recomputes each segment in the role of its forward.
"""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model_state_dict, inject_adapter_in_model, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.initialization import no_init_weights

from lopd_fast.activation_offload import check_offload, offloaded
from lopd_fast.config import LoraConfig, ModelConfig
from lopd_fast.errors import UserError
from lopd_fast.file_mode import take_mode
from lopd_fast.liger import use_liger, uses_liger
from lopd_fast.lockstep import Lockstep
from lopd_fast.packed_forward import packed_hidden, packing_of
from lopd_fast.prefix_tree import Packed, pack
from lopd_fast.sharding import part_of, shard_frozen, whole

ADAPTER_FILE = "adapter_model.safetensors"
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Head:
    """The output head: logits = softcap(logit_scale * (h W^T + bias))."""

    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    logit_scale: float = 1.0
    logit_softcap: float | None = None


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of the model folder."""
    with _loading("tokenizer", config.path):
        return AutoTokenizer.from_pretrained(
            Path(config.path).expanduser(), trust_remote_code=config.trust_remote_code, local_files_only=True
        )


def load_model(config: ModelConfig) -> PreTrainedModel:
    """The causal language model of a folder, on its device and in its dtype, frozen and in evaluation mode."""
    device = pick_device(config.device)
    with _loading("model", config.path):
        model = AutoModelForCausalLM.from_pretrained(
            Path(config.path).expanduser(),
            dtype=pick_dtype(config.dtype, device),
            attn_implementation=config.attention,
            trust_remote_code=config.trust_remote_code,
            local_files_only=True,
        )
    nn.Module.to(model, device)  # the class's own `to` hides its signature from type checkers
    if config.liger_kernels:
        use_liger(model)
    return model.requires_grad_(False).eval()


def pick_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"model.device={name} cannot be used here: {str(error).splitlines()[0]}") from None
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bf16, except on a CPU that multiplies fp32 faster (one without bf16 units), where it is fp32."""
    if name != "auto":
        return getattr(torch, name)
    if device.type != "cpu":
        return torch.bfloat16
    seconds = {}
    for dtype in (torch.bfloat16, torch.float32):
        left = torch.randn(256, 1024).to(dtype)
        right = torch.randn(1024, 1024).to(dtype)
        torch.mm(left, right)  # the first product pays for set-up
        started = time.perf_counter()
        for _ in range(3):
            torch.mm(left, right)
        seconds[dtype] = time.perf_counter() - started
    return min(seconds, key=lambda dtype: seconds[dtype])


@contextmanager
def _loading(what: str, path: str) -> Iterator[None]:
    """Say in one sentence what cannot be loaded from the model folder."""
    if not path:
        raise UserError("No model is named; set model.path to the folder of a causal language model.")
    if not Path(path, "config.json").expanduser().is_file():
        raise UserError(
            f"There is no model at {path} (no config.json in it); set model.path to a folder with one."
        )
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, SafetensorError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"The {what} at {path} cannot be loaded: {reason}") from error


class Backbone(nn.Module):
    """One frozen model and the adapters on it."""

    def __init__(
        self, model: PreTrainedModel, gradient_checkpointing: bool = False, activation_offload: bool = False
    ) -> None:
        """Freezes `model`.

        Raises:
            UserError: `activation_offload` without checkpoints, or on a CPU.
        """
        super().__init__()
        if activation_offload:
            check_offload(model.device, gradient_checkpointing)
        self.model = model.requires_grad_(False).eval()
        self.role_name = "teacher"
        self.lockstep = Lockstep()
        self._adapters: list[str] = []
        self._lora_layers: list[LoraLayer] = []
        self._trainable: list[nn.Parameter] = []
        self._fixed: list[nn.Parameter] = []
        self.gradient_checkpointing = gradient_checkpointing
        self.activation_offload = activation_offload
        if gradient_checkpointing:
            checkpoint_layers(model, lambda: (nullcontext(), self.role(self.role_name)))

    def shard(self, lockstep: Lockstep) -> None:
        """Leave each process a part of the frozen weights of the blocks."""
        shard_frozen(self.model, lockstep.world.size)
        self.lockstep = lockstep

    def add_adapter(self, name: str, lora: LoraConfig, trainable: bool = True) -> None:
        """Put a LoRA named `name` on the seven projections (rank and alpha of `lora`); its B starts at 0."""
        present = {path.rsplit(".", 1)[-1] for path, _ in self.model.named_modules()}
        targets = [target for target in PROJECTIONS if target in present]
        if not targets:
            raise UserError(
                f"{type(self.model).__name__} has none of the projections {', '.join(PROJECTIONS)} a LoRA goes on."
            )
        config = PeftLoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, bias="none")
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="Already found a `peft_config`"
            )  # several adapters are meant
            inject_adapter_in_model(config, self.model, adapter_name=name)
        self._lora_layers = [module for module in self.model.modules() if isinstance(module, LoraLayer)]
        for layer in self._lora_layers:
            layer.cast_input_dtype_enabled = False  # `precision` brings weight and input together
        parameters = [parameter for _, parameter in self.adapter_parameters(name)]
        for parameter in parameters:
            parameter.data = parameter.data.float()  # AdamW steps of 1e-5 vanish in bf16
        (self._trainable if trainable else self._fixed).extend(parameters)
        self._adapters.append(name)
        self._switch(self.role_name)

    def adapter_parameters(self, name: str) -> list[tuple[str, nn.Parameter]]:
        """Named LoRA parameters of adapter `name`, in a fixed order."""
        return [
            (key, value)
            for key, value in self.model.named_parameters()
            if f".{name}." in key and "lora_" in key
        ]

    def adapter_state(self, name: str) -> dict[str, Tensor]:
        """State dict of adapter `name`, detached, as peft names it."""
        state = get_peft_model_state_dict(self.model, adapter_name=name, save_embedding_layers=False)
        return {key: value.detach() for key, value in state.items()}

    def load_adapter_state(self, name: str, state: dict[str, Tensor]) -> None:
        """Copy a state of `adapter_state` into adapter `name`; every tensor must find its place."""
        result = set_peft_model_state_dict(self.model, dict(state), adapter_name=name)
        missing = [key for key in result.missing_keys if f".{name}." in key and "lora_" in key]
        if missing or result.unexpected_keys:
            raise UserError(
                f"The saved adapter does not fit '{name}': {len(missing)} tensors are missing "
                f"and {len(result.unexpected_keys)} unknown."
            )
        self._switch(self.role_name)

    @contextmanager
    def role(self, name: str) -> Iterator[None]:
        """Run the backbone as `name`: "teacher" (no adapter) or the name of an adapter. Restores the role it found."""
        if name != "teacher" and name not in self._adapters:
            raise ValueError(f"There is no adapter '{name}' on this backbone; it has {self._adapters}.")
        before = self.role_name
        self._switch(name)
        try:
            yield
        finally:
            self._switch(before)

    def hidden(self, packed: Packed, embeddings: Tensor | None = None) -> Tensor:
        """Last hidden states (T, H) of packed tokens, or of embeddings (T, H) in their place, in the current role."""
        if embeddings is not None:
            embeddings = self.lockstep.differentiable(embeddings)
        with self.precision(), self.saving():
            return packed_hidden(self.model, packed, embeddings, lockstep=self.lockstep)

    def idle(self, turns: int) -> None:
        """Run in the current role for the `turns` that other processes have and this one does not."""
        packed = pack([[0]])[0].to(self.device)
        self.lockstep.idle(turns, lambda: self.hidden(packed))

    @contextmanager
    def policy(self, name: str = "teacher") -> Iterator[PreTrainedModel]:
        """The model to sample from in the role `name`.

        Where its weights are in parts, processes that sample different texts cannot gather them together: then it is a
        merged copy for as long as it is used.
        """
        if self.lockstep.active:
            yield plain_copy(
                self.model, lambda: self.merged_state(None if name == "teacher" else name), blank=True
            )
        else:
            with self.role(name):
                yield self.model

    def precision(self) -> AbstractContextManager[Any]:
        """Autocast where the backbone is in half precision and the adapters' fp32 masters are to be used in it.

        Otherwise a LoRA layer keeps an fp32 copy of its input for the backward.
        """
        dtype = self.model.dtype
        return torch.autocast(self.device.type, dtype) if dtype.itemsize == 2 else nullcontext()

    def saving(self) -> AbstractContextManager[Any]:
        """How activations are saved for a backward: where they are, or in host memory."""
        return offloaded() if self.activation_offload else nullcontext()

    @property
    def shares_prefixes(self) -> bool:
        """Whether packed sequences may share tokens on this backbone."""
        return packing_of(self.model) == "tree"

    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings (..., H) of ids (...)."""
        return self.model.get_input_embeddings()(ids)

    @property
    def head(self) -> Head:
        """The output head of the backbone."""
        return head_of(self.model)

    @property
    def config(self) -> Any:
        """The model's own configuration."""
        return self.model.config

    @property
    def device(self) -> torch.device:
        """Where the backbone lives."""
        return self.model.device

    @property
    def hidden_size(self) -> int:
        """H."""
        return embedding_table(self.model).shape[1]

    def save_adapter(self, name: str, folder: Path) -> None:
        """Write adapter `name` as peft's own folder of a causal language model's adapter."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {f"base_model.model.{key}": value for key, value in self.adapter_state(name).items()}
        save_file({key: value.cpu().contiguous() for key, value in state.items()}, folder / ADAPTER_FILE)
        self.model.peft_config[name].save_pretrained(str(folder))  # pyright: ignore
        take_mode([folder / ADAPTER_FILE], folder / "adapter_config.json")

    def merged_state(self, name: str | None) -> Iterator[tuple[str, Tensor]]:
        """(name, weight) of the plain model, with adapter `name` added into its projections, one at a time."""
        lora = {path: module for path, module in self.model.named_modules() if isinstance(module, LoraLayer)}
        for key, value in self.model.state_dict().items():
            if "lora_" in key:
                continue
            path, _, leaf = key.rpartition(".base_layer.")
            value = whole(value)
            if path in lora and leaf == "weight" and name is not None:
                delta = lora[path].get_delta_weight(name)  # pyright: ignore[reportAttributeAccessIssue]
                yield f"{path}.weight", (value.float() + delta.float()).to(value.dtype)
            elif path in lora:
                yield f"{path}.{leaf}", value
            else:
                yield key, value

    def _switch(self, name: str) -> None:
        """Activate one adapter, or none, and restore which parameters learn (peft flips that with the switch)."""
        for layer in self._lora_layers:
            layer.enable_adapters(name != "teacher")
            if name != "teacher":
                layer.set_adapter(name)
        for parameter in self._trainable:
            parameter.requires_grad_(True)
        for parameter in self._fixed:
            parameter.requires_grad_(False)
        self.role_name = name


def checkpoint_layers(model: PreTrainedModel, contexts: Callable[[], tuple[Any, Any]] | None = None) -> None:
    """Non-reentrant checkpointing of every block; `contexts` gives the contexts of forward and recomputation."""
    options: dict[str, Any] = {"use_reentrant": False}
    if contexts is not None:
        options["context_fn"] = contexts
    model.gradient_checkpointing_enable(options)
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.training = (
                True  # transformers checkpoints in training mode only; the block's dropout stays off
            )


def embedding_table(model: PreTrainedModel) -> Tensor:
    """The input embeddings (V, H) of a causal language model."""
    table = model.get_input_embeddings().weight
    assert isinstance(table, Tensor)
    return table


def head_of(model: PreTrainedModel) -> Head:
    """The output head of a causal language model, with the scale and soft-cap that its configuration names.

    Raises:
        UserError: the head is an adapter or otherwise not a plain linear layer, so its weight alone is not its output.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise UserError(
            f"The head of this model is a {type(head).__module__}.{type(head).__name__}; the fused loss needs a plain "
            "torch.nn.Linear (take the adapter off lm_head, or merge it)."
        )
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None)
    scaling = getattr(config, "logits_scaling", None)
    softcap = getattr(config, "final_logit_softcapping", None)
    return Head(
        head.weight, head.bias, float(scale) if scale else 1.0 / float(scaling) if scaling else 1.0, softcap
    )


def plain_copy(
    model: PreTrainedModel, weights: Callable[[], Iterator[tuple[str, Tensor]]], blank: bool = False
) -> PreTrainedModel:
    """A fresh model of the same configuration and dtype without any adapter, holding `weights`.

    `blank`: made where it is to be, with no random weights first; for copies that are made again and again.
    """
    config = deepcopy(model.config)
    with no_init_weights() if blank else nullcontext(), model.device if blank else nullcontext():
        fresh = AutoModelForCausalLM.from_config(
            config, dtype=model.dtype, attn_implementation=config._attn_implementation
        )
    fresh = fresh.to(model.device).requires_grad_(False).eval()
    if blank:
        fresh.tie_weights()  # which goes with the random weights otherwise
        own = dict(fresh.named_buffers())
        for name, buffer in model.named_buffers():
            own[name].copy_(buffer)  # a GPU's powers are not the CPU's to the last bit
    fresh.generation_config = deepcopy(model.generation_config)
    if uses_liger(model):
        use_liger(fresh)
    copy_weights(fresh, weights())
    return fresh


@torch.no_grad()
def copy_weights(model: PreTrainedModel, weights: Iterator[tuple[str, Tensor]]) -> None:
    """Copy (name, weight) pairs into `model` in place."""
    own = model.state_dict(keep_vars=True)
    for name, weight in weights:
        own[name].copy_(part_of(weight, own[name]))
