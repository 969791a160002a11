"""A tiny chat model, its tokenizer, an environment and the parts of a run, for the tests of the engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lopd_fast.backbone import Backbone
from lopd_fast.bank import Experience, ExperienceBank
from lopd_fast.batch import Rollout
from lopd_fast.build import Parts
from lopd_fast.composer import Composer
from lopd_fast.config import Config, load_config
from lopd_fast.envs.base import Environment, Message, StepResult, Task
from lopd_fast.prefix_tree import Packed, pack
from lopd_fast.processes import World
from lopd_fast.render import Renderer
from lopd_fast.rollout.hf import HFRollout
from lopd_fast.rollout.shared import SharedRollout
from lopd_fast.student import Student

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # 0, 1, 2, as in SmolLM2
END = 2  # the end of a turn, the end of a text and the padding
MERGES = [
    *[("a", "b"), ("e", "r"), ("u", "s"), ("us", "er"), ("i", "n"), ("a", "n"), ("s", "t"), ("t", "h")],
    *[("Ġ", "a"), ("Ġ", "t"), ("o", "n"), ("r", "e"), ("o", "k"), ("l", "o"), ("lo", "ok"), ("an", "s")],
]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = 288  # wider than the tokenizer, as heads often are

SMALL = [
    *["composer.num_queries=3", "composer.depth=2", "composer.ff_mult=2"],
    *["composer.lora.rank=2", "composer.lora.alpha=4", "student.lora.rank=2", "student.lora.alpha=4"],
    *["retrieval.neighbours=2", "rollout.max_new_tokens=6", "rollout.max_tokens=512", "loss.k=5"],
    *["train.tasks_per_step=3", "train.steps=6", "optim.lr=1e-2", "cold_start.optim.lr=1e-2"],
]


def tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 275 tokens, with pad id == eos id."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIALS, *alphabet, *(left + right for left, right in MERGES)]
    bpe = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, MERGES))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    bpe.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        unk_token=SPECIALS[0],
        bos_token=SPECIALS[1],
        eos_token=SPECIALS[2],
        pad_token=SPECIALS[2],
    )
    fast.chat_template = template
    return fast


def model(kind: str = "llama", *, tie: bool = True, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Two layers of width 32; weights large enough that its predictions are far from uniform. Always the same ones."""
    sizes: dict[str, Any] = dict(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=tie,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=END,
        pad_token_id=END,
    )
    with torch.random.fork_rng():
        torch.manual_seed(7)
        if kind == "qwen3":
            made: PreTrainedModel = Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=8))
        elif kind == "olmo3":  # the first block sees 24 tokens back, less than a prompt
            kinds = ["sliding_attention", "full_attention"]
            made = Olmo3ForCausalLM(Olmo3Config(**sizes, sliding_window=24, layer_types=kinds))
        else:
            made = LlamaForCausalLM(LlamaConfig(**sizes))
    return made.to(dtype=dtype).eval()  # pyright: ignore[reportCallIssue]


class HashEncoder:
    """Every text has a random direction of its own."""

    name, dim, query_prompt, document_prompt = "hash", 8, "", ""

    def embed_queries(self, texts: Sequence[str]) -> np.ndarray:
        return np.array(
            [np.random.default_rng([*text.encode()]).standard_normal(self.dim) for text in texts],
            dtype=np.float32,
        )

    def embed_documents(self, texts: Sequence[str], progress: Any = None) -> np.ndarray:
        return self.embed_queries(texts)


class ParityEnvironment:
    """Full reward for a last action whose length is even; every action before it is answered with its length."""

    name = "parity"

    def __init__(self, max_turns: int = 1) -> None:
        self.max_turns = max_turns

    def tasks(self, split: str, count: int, seed: int) -> list[Task]:
        return [
            Task(f"{split}/{seed}/{i}", f"Say {split} {seed + i}.", group=f"g{i % 2}") for i in range(count)
        ]

    def solution(self, task: Task) -> str:
        return "ab" * (1 + len(task.text) % 3)

    def start(self, task: Task) -> "ParityEpisode":
        return ParityEpisode([{"role": "user", "content": task.text}], self.max_turns)


@dataclass
class ParityEpisode:
    """One attempt; two of the same task compare equal, as dataclasses do."""

    messages: Sequence[Message]
    turns_left: int

    def step(self, action: str) -> StepResult:
        self.turns_left -= 1
        last = self.turns_left == 0
        return StepResult("" if last else f"{len(action)} so far", float(last and len(action) % 2 == 0), last)


def config(*words: str) -> Config:
    """A configuration small enough for tests, with `section.key=value` words laid over it."""
    return load_config(None, [*SMALL, *words])


def experiences(count: int = 4) -> list[Experience]:
    """Experiences of unequal length."""
    return [
        Experience(f"e{i}", f"Say old {i}.", "say ab" + " and on" * i + " -> ok", 1.0, group=f"g{i % 2}")
        for i in range(count)
    ]


def parts(
    *words: str,
    kind: str = "llama",
    tie: bool = True,
    environment: Environment | None = None,
    bank: int = 4,
    world: World | None = None,
) -> Parts:
    """The parts of a run, as `lopd_fast.build.build` would make them, with `bank` experiences to start from."""
    settings = config(*words)
    renderer = Renderer(tokenizer())
    torch.manual_seed(settings.train.seed)
    backbone = Backbone(model(kind, tie=tie), settings.model.gradient_checkpointing)
    student = Student(backbone, settings.student, settings.rollout.merge_lora)
    composer = Composer(backbone, renderer.tokenizer, settings.composer)
    store = ExperienceBank(HashEncoder())
    store.add(experiences(bank))
    engine = HFRollout(renderer, settings.rollout)
    if world is not None and world.launched:
        engine = SharedRollout(renderer, settings.rollout, world)
    return Parts(
        settings,
        backbone,
        renderer,
        student,
        composer,
        store,
        engine,
        environment or ParityEnvironment(),
        world or World(),
    )


@torch.no_grad()
def stir(tensors: Sequence[Tensor], seed: int = 1, size: float = 0.1) -> None:
    """Move tensors by noise: a fresh LoRA's B is 0, so that half of its gradients would be."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        tensor += size * torch.randn(tensor.shape, generator=generator)


def learning(parts: Parts) -> dict[str, Tensor]:
    """Every tensor of theta and phi by name."""
    named = [(f"student/{name}", value) for name, value in parts.student.trainable()]
    for part, values in parts.composer.trainable().items():
        named += [(f"{part}/{name}", value) for name, value in values]
    return dict(named)


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Detached copies."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def rollout(
    number: int, mask: Sequence[int], reward: float, found: Sequence[Experience] = (), text: str | None = None
) -> Rollout:
    """A rollout of made-up ids; `mask` says which of them the student wrote."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(3, 275, (len(mask),), generator=generator).tolist()
    task = Task(f"t{number}", text or f"Say {number}." + " please" * number)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": task.text}]
    return Rollout(task, messages, ids, [bool(mine) for mine in mask], reward, experiences=list(found))


def save_model(folder: Path, template: str = CHATML) -> Path:
    """A model folder as a user would name it."""
    model().save_pretrained(folder)
    tokenizer(template).save_pretrained(folder)
    return folder


def packed(ids: Tensor) -> Packed:
    """Rows of ids (B, T) as B packed sequences that stand whole: their states are those of the rows, flattened."""
    return pack(ids.tolist(), share=False)[0]
