"""The part of vLLM that the rollout engine calls, restated for machines without a GPU: a sleeping, waking LLM.

Signatures are those of vLLM 0.2x (LLM and its engine arguments, generate, sleep, wake_up, apply_model, SamplingParams,
LoRARequest): an argument that is not among them is a TypeError. It samples with transformers on the CPU, one request at
a time. What vLLM forgets is forgotten: level 2 loses the weights, an adapter is read once for each id, the caches are
there only between wake_up and sleep.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from lopd_fast.rollout.sampling import NucleusOfTopK, Sampling

MAX_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
made: list[LLM] = []


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]


@dataclass
class SamplingParams:
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    logprobs: int | None = None
    detokenize: bool = True


@dataclass
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False

    def __post_init__(self) -> None:
        if self.lora_int_id < 1:
            raise ValueError(f"id must be > 0, got {self.lora_int_id}")
        assert self.lora_path


@dataclass
class CompletionOutput:
    index: int
    text: str
    token_ids: Sequence[int]


@dataclass
class RequestOutput:
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]


class Worker:
    """The model inside the engine: `load_weights` takes the names of a plain checkpoint and no others."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def load_weights(self, weights: Any) -> set[str]:
        assert "weights" in self.llm.mapped, "written to memory that is not mapped"
        own = self.llm.model.state_dict()
        names = set()
        with torch.no_grad():
            for name, tensor in weights:
                own[name].copy_(tensor)
                names.add(name)
        self.llm.lost = self.llm.lost and len(names) < len(list(self.llm.model.named_parameters()))
        return names


class LLM:
    def __init__(
        self,
        model: str,
        *,
        tokenizer: str | None = None,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        seed: int = 0,
        gpu_memory_utilization: float = 0.9,
        enforce_eager: bool = False,
        max_model_len: int | None = None,
        generation_config: str = "auto",
        enable_sleep_mode: bool = False,
        enable_lora: bool = False,
        max_loras: int = 1,
        max_lora_rank: int = 16,
    ) -> None:
        assert os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0", "apply_model would cross processes"
        if gpu_memory_utilization > 0.8:
            raise ValueError("Free memory on device is less than desired GPU memory utilization.\nmore")
        assert max_lora_rank in MAX_LORA_RANKS and enable_sleep_mode and generation_config == "vllm"
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
        self.max_model_len, self.max_rank = max_model_len, max_lora_rank if enable_lora else 0
        self.mapped, self.lost = {"weights", "kv_cache"}, False
        self.adapters: dict[int, Any] = {}
        self.levels: list[int] = []
        self.prompts: list[tuple[list[int], SamplingParams]] = []
        made.append(self)

    def sleep(self, level: int = 1) -> None:
        assert self.mapped == {"weights", "kv_cache"}, "asleep already"
        self.levels.append(level)
        self.mapped = set()
        if level == 2:
            self.lost = True
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.fill_(float("nan"))

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.mapped |= set(tags or ("weights", "kv_cache"))
        assert self.mapped <= {"weights", "kv_cache"}

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        return [func(Worker(self))]

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[TokensPrompt],
        sampling_params: Sequence[SamplingParams] | SamplingParams | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
        priority: list[int] | None = None,
    ) -> list[RequestOutput]:
        assert self.mapped == {"weights", "kv_cache"} and not self.lost, "asleep, or without weights"
        assert isinstance(sampling_params, list) and len(sampling_params) == len(prompts) and not use_tqdm
        self.prompts += [(p["prompt_token_ids"], s) for p, s in zip(prompts, sampling_params, strict=True)]
        model = self.model if lora_request is None else self._adapted(lora_request)
        return [
            self._one(model, prompt, params) for prompt, params in zip(prompts, sampling_params, strict=True)
        ]

    def _adapted(self, request: LoRARequest) -> Any:
        if request.lora_int_id not in self.adapters:  # later files under this id are never read
            assert self.max_rank
            fresh = type(self.model)(self.model.config).eval()
            fresh.load_state_dict(self.model.state_dict())
            found = PeftModel.from_pretrained(fresh, request.lora_path)
            assert getattr(found.peft_config["default"], "r") <= self.max_rank  # noqa: B009
            self.adapters = {request.lora_int_id: found}  # max_loras=1
        return self.adapters[request.lora_int_id]

    def _one(self, model: Any, prompt: TokensPrompt, params: SamplingParams) -> RequestOutput:
        ids = list(prompt["prompt_token_ids"])
        assert params.max_tokens is not None and params.ignore_eos and not params.detokenize
        if self.max_model_len is not None and len(ids) + 1 > self.max_model_len:
            raise ValueError("The decoder prompt is longer than the maximum model length")
        generator = torch.Generator().manual_seed(params.seed or 0)
        shape = NucleusOfTopK(Sampling(params.temperature, params.top_p, params.top_k))
        new: list[int] = []
        while len(new) < params.max_tokens and len(ids) + len(new) < (self.max_model_len or 1 << 30):
            logits = model(input_ids=torch.tensor([ids + new])).logits[:, -1]
            if params.temperature == 0:
                token = int(logits.argmax())
            else:
                chances = shape(torch.tensor([ids]), logits).softmax(-1)  # pyright: ignore
                token = int(torch.multinomial(chances, 1, generator=generator))
            new.append(token)
            if token in (params.stop_token_ids or ()):
                break
        return RequestOutput(ids, [CompletionOutput(0, "", tuple(new))])


def install(patch: pytest.MonkeyPatch) -> None:
    """Stand in for vllm and vllm.lora.request until the patch is undone."""
    here = sys.modules[__name__]
    for name in ("vllm", "vllm.lora", "vllm.lora.request"):
        patch.setitem(sys.modules, name, here)
    made.clear()
