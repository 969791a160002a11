"""A run without data: the real backbone, student, composer and trainer on the meta device.

What is tracked is the code that trains, not a formula beside it, so the plan follows when that code changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, DynamicCache, PretrainedConfig, PreTrainedModel

from lopd_fast import activation_offload, fused_head, scratch
from lopd_fast.backbone import Backbone
from lopd_fast.bank import Experience
from lopd_fast.batch import Rollout
from lopd_fast.build import Parts
from lopd_fast.cold_start import trajectory_nll
from lopd_fast.composer import Composer
from lopd_fast.config import Config
from lopd_fast.envs.base import Message, Task
from lopd_fast.plan.ledger import Ledger, Phase, Speed
from lopd_fast.plan.load import Load
from lopd_fast.student import Student
from lopd_fast.trainer import Trainer

PARTS = ("activations", "logits chunks", "weights", "adapters", "gradients", "optimiser", "KV cache")
META = torch.device("meta")


class Probe:
    """A run whose every tensor lies on `device`: the meta device, or a real one to measure what was planned."""

    def __init__(
        self,
        config: Config,
        model: PretrainedConfig,
        dtype: torch.dtype,
        speed: Speed,
        *,
        cuda: bool,
        device: torch.device = META,
    ) -> None:
        """`cuda`: on the meta device, take the ways that the code takes on CUDA; otherwise those of a CPU."""
        if config.optim.kind == "paged_adamw8bit":  # as if no page had left the device yet
            config = replace(config, optim=replace(config.optim, kind="adamw8bit"))
        self.config, self.cuda, self.device = config, cuda, device
        self.vocabulary = model.get_text_config().vocab_size
        self.ledger = Ledger(device, PARTS, speed)
        self.ledger.fresh_part = self._part
        if config.model.activation_offload:
            where = torch.device("cuda" if cuda else "cpu")
            activation_offload.check_offload(where, config.model.gradient_checkpointing)
        with self._tracking(), device:
            body = AutoModelForCausalLM.from_config(
                model, dtype=dtype, attn_implementation=config.model.attention
            )
            backbone = Backbone(body, config.model.gradient_checkpointing, config.model.activation_offload)
            student = Student(backbone, config.student, config.rollout.merge_lora)
            composer = Composer(backbone, cast(Any, _letters), config.composer)
            composer.freeze_anchor()
            unused: Any = None
            self.parts = Parts(
                config, backbone, cast(Any, _Renderer()), student, composer, unused, unused, unused
            )
            self.trainer = Trainer(self.parts, [], say=lambda _: None)
            self.trainer.clock = cast(Any, self.ledger)
            with student.policy() as policy:
                self._name_weights(policy)
        with self._tracking():
            self._start_optimisers()

    def step(self, load: Load) -> dict[str, Phase]:
        """Phases of an update on one micro-batch, by the names that the trainer gives them."""
        rollouts = _rollouts(load)
        self.ledger.phases.clear()
        scratch.release_scratch()  # of another load
        with self._tracking():
            if load.micro_batches > 1:  # those before this one left theirs
                self._fill_gradients((*self.trainer.theta, *self.trainer.phi))
            self.trainer.update(rollouts)
        return dict(self.ledger.phases)

    def cold_start(self, load: Load) -> dict[str, Phase]:
        """The phase "cold start": its step on one micro-batch of several, theta having no optimiser's state yet."""
        examples = [(rollout, rollout.experiences) for rollout in _rollouts(load)]
        parts, optimiser = self.parts, self.trainer.phi_optimizer
        self.trainer.theta_optimizer.state.clear()
        self.ledger.phases.clear()
        with self._tracking():
            self._fill_gradients(self.trainer.phi)
            with self.ledger.phase("cold start"):
                trajectory_nll(parts.backbone, parts.composer, parts.renderer, examples).backward()
                optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            self._start_optimisers()
        return {"cold start": self.ledger.phases["cold start"]}

    def sample(self, load: Load) -> dict[str, Phase]:
        """Phases of sampling: "prefill" of the longest prompt of a turn, and "decode" of the last token."""
        before = load.tokens - load.turn
        self.ledger.phases.clear()
        with (
            self._tracking(),
            torch.no_grad(),
            self.parts.student.policy() as policy,
            _evaluating(policy),
        ):
            with self.ledger.phase("prefill"):
                self._forward(policy, load.sampled, before, _NamedCache(self.ledger, policy.config))
            cache = _NamedCache(self.ledger, policy.config)
            text = policy.config.get_text_config()
            width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
            shape = load.sampled, text.num_key_value_heads, load.tokens - 1, width
            for layer in range(text.num_hidden_layers):
                keys, values = (torch.empty(shape, dtype=policy.dtype, device=self.device) for _ in range(2))
                cache.update(keys, values, layer)
            del keys, values
            with self.ledger.phase("decode"):
                self._forward(policy, load.sampled, 1, cache)
        return dict(self.ledger.phases)

    @contextmanager
    def _tracking(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self.device.type == "meta":
                # autocast does not know the device
                inert = {"autocast": lambda *_, **__: nullcontext(), "is_autocast_enabled": lambda *_: False}
                stack.enter_context(_replaced(torch, **inert))
                attention = _cuda_attention if self.cuda else _cpu_attention
                stack.enter_context(_replaced(functional, scaled_dot_product_attention=attention))
                stack.enter_context(_replaced(activation_offload, to_host=_forgotten))
                if self.cuda:
                    stack.enter_context(_replaced(fused_head, HALF_DEVICES=("meta",)))
                else:
                    stack.enter_context(_replaced(scratch, HOSTS=("meta",)))
            stack.enter_context(self.ledger)
            yield

    def _part(self, tensor: Tensor) -> str:
        logits = tensor.dim() == 2 and tensor.shape[1] == self.vocabulary
        return "logits chunks" if logits or tensor.dtype == torch.uint8 else "activations"  # scratch is bytes

    def _name_weights(self, policy: PreTrainedModel) -> None:
        named = list(self.parts.backbone.model.named_parameters())
        self.ledger.name((value for _, value in named), "weights")
        self.ledger.name(policy.parameters(), "weights")
        self.ledger.name((value for name, value in named if "lora_" in name), "adapters")
        composer, anchor = self.parts.composer, self.parts.composer._anchor
        assert anchor is not None  # frozen before a step is tracked
        self.ledger.name((*composer.qformer.parameters(), *anchor.parameters()), "adapters")
        for parameter in (*self.trainer.theta, *self.trainer.phi):
            parameter.register_post_accumulate_grad_hook(self._name_gradient)

    def _name_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.ledger.name([parameter.grad], "gradients")

    def _fill_gradients(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
            self._name_gradient(parameter)

    def _start_optimisers(self) -> None:
        self._fill_gradients((*self.trainer.theta, *self.trainer.phi))
        for optimiser in (self.trainer.theta_optimizer, self.trainer.phi_optimizer):
            for group in optimiser.param_groups:
                group["foreach"] = self.cuda  # what torch chooses there; it holds a copy of some of the state
            optimiser.step()
            for state in optimiser.state.values():
                self.ledger.name((x for x in state.values() if isinstance(x, Tensor)), "optimiser")
            optimiser.zero_grad(set_to_none=True)

    def _forward(self, policy: PreTrainedModel, rows: int, new: int, cache: DynamicCache) -> None:
        """`new` tokens of `rows` rollouts after those in the cache, as generate asks for them.

        The first is shorter by one, for rollouts are seldom of one length.
        """
        mask = torch.ones(rows, cache.get_seq_length() + new, dtype=torch.int64)
        if rows > 1:
            mask[0, 0] = 0
        mask = mask.to(self.device)
        ids = torch.zeros(rows, new, dtype=torch.int64, device=self.device)
        policy(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1)


@contextmanager
def _replaced(module: ModuleType, **values: Any) -> Iterator[None]:
    """Other values of a module's names inside: the meta device is not one that the code below knows."""
    before = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)


def _forgotten(x: Tensor) -> Callable[[], Tensor]:
    """A tensor that went to host memory, which the plan does not count, and comes back."""
    shape, dtype, device = x.shape, x.dtype, x.device
    return lambda: torch.empty(shape, dtype=dtype, device=device)


def _cuda_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Flash attention, or the memory-efficient one where there is a mask; neither makes the scores."""
    if attn_mask is None and query.dtype in (torch.bfloat16, torch.float16):
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask, float("-inf"))
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    train = torch.is_grad_enabled()
    return efficient(query, key, value, attn_mask, train, dropout_p, is_causal, scale=scale)[0]


def _cpu_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask, float("-inf"))
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return flash(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


class _NamedCache(DynamicCache):
    """A cache of keys and values whose tensors are counted as such."""

    def __init__(self, ledger: Ledger, config: PretrainedConfig) -> None:
        super().__init__(config=config)
        self._ledger = ledger

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        kept = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self._ledger.name(kept, "KV cache")
        return kept


class _Renderer:
    """Renders a conversation to as many ids as its text has letters."""

    pad_id = 0

    def prompt(self, messages: Sequence[Message], num_latents: int = 0) -> tuple[list[int], int]:
        return [0] * num_latents + _letters(messages[0]["content"]).input_ids, 0


def _letters(text: str, **_: Any) -> Any:
    """A tokenizer with an id for each letter."""
    return SimpleNamespace(input_ids=[ord(letter) % 256 for letter in text])


def _rollouts(load: Load) -> list[Rollout]:
    """The made-up rollouts of a micro-batch, which have nothing in common, so nothing of them is shared."""
    prompt, made = load.tokens - load.latents - load.response, []
    for number in range(load.rollouts):
        letter = chr(number)
        found = [Experience(str(i), letter, letter * load.memory, 1.0) for i in range(load.experiences)]
        messages = [{"role": "user", "content": letter * prompt}]
        ids, mask = [number % 256] * load.response, [True] * load.response
        made.append(Rollout(Task(letter, letter), messages, ids, mask, 1.0, experiences=found))
    return made


@contextmanager
def _evaluating(policy: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode as when sampling: a model that is checkpointed keeps no cache in training mode."""
    training = [module for module in policy.modules() if module.training]
    policy.eval()
    yield
    for module in training:
        module.training = True
