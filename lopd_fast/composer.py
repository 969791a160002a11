"""The composer phi: retrieved experiences -> latent tokens that condition the frozen teacher.

encoder: the frozen backbone with the "encoder" LoRA reads "task + past trajectory" and gives its last hidden states;
compressor: a QFormer turns each memory, whatever its length, into K latent tokens. One task's latents are those of
its J experiences in retrieval order, (J*K, H).
"""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from hashlib import sha256

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from lopd_fast.backbone import Backbone
from lopd_fast.bank import Experience
from lopd_fast.config import ComposerConfig
from lopd_fast.prefix_tree import pack
from lopd_fast.processes import World
from lopd_fast.qformer import QFormer

MEMORY_HEAD = "Task to solve:\n{task}\n\nReference past trajectory:\n"
ANCHOR_CACHE_BYTES = 256 * 2**20
Request = tuple[str, Sequence[Experience]]  # a task's text and the experiences retrieved for it


class Composer(nn.Module):
    """Encoder LoRA (it lives on the backbone) and QFormer, and their frozen snapshot phi_0 for the anchor."""

    def __init__(
        self, backbone: Backbone, tokenizer: PreTrainedTokenizerBase, config: ComposerConfig
    ) -> None:
        super().__init__()
        self.config = config
        self.tokenizer = tokenizer
        self._backbone = [backbone]  # in a list: its parameters are not this module's
        backbone.add_adapter("encoder", config.lora)
        heads = config.heads or backbone.config.get_text_config().num_attention_heads
        self.qformer = QFormer(
            backbone.hidden_size,
            num_queries=config.num_queries,
            depth=config.depth,
            heads=heads,
            ff_mult=config.ff_mult,
            share_layers=config.share_layers,
        ).to(backbone.device)
        self._anchor: QFormer | None = None
        self._anchor_cache: dict[str, Tensor] = {}  # by the pair's digest, the oldest first

    def forward(self, requests: Sequence[Request]) -> list[Tensor]:
        """Latents of every request: (J_b*K, H) fp32, J_b >= 0 being the number of its experiences."""
        distinct = list(dict.fromkeys(_pairs(requests)))
        latents = self._compress(distinct, "encoder", self.qformer)  # (distinct, K, H)
        return _per_request(
            requests, dict(zip(distinct, latents, strict=True)), latents.new_zeros(0, latents.shape[-1])
        )

    def freeze_anchor(self) -> None:
        """Take the present composer as phi_0, the anchor."""
        if self._anchor is None:
            self.backbone.add_adapter("anchor", self.config.lora, trainable=False)
        self.backbone.load_adapter_state("anchor", self.backbone.adapter_state("encoder"))
        self._anchor = deepcopy(self.qformer).requires_grad_(False)
        self._anchor_cache.clear()

    @torch.no_grad()
    def anchor(self, requests: Sequence[Request]) -> list[Tensor]:
        """c_phi0 of every request, computed once per (task, experience) and kept on the CPU.

        The cache holds ANCHOR_CACHE_BYTES at most. It is part of `state`: what a pair was encoded with in one batch
        decides its last bits, so a resumed run must find the same pairs in it.
        """
        assert self._anchor is not None, "freeze_anchor comes first"
        device = self.backbone.device
        distinct = {pair: _digest(pair) for pair in _pairs(requests)}
        missing = [pair for pair, digest in distinct.items() if digest not in self._anchor_cache]
        if missing or self.backbone.lockstep.active:
            for pair, latents in zip(missing, self._compress(missing, "anchor", self._anchor), strict=True):
                self._anchor_cache[distinct[pair]] = latents.to("cpu", copy=True)
        found = {pair: self._anchor_cache[digest].to(device) for pair, digest in distinct.items()}
        self._forget()
        return _per_request(requests, found, torch.zeros(0, self.backbone.hidden_size, device=device))

    def pool_anchors(self, world: World) -> None:
        """Give every process the anchors of all, those of the first process first.

        A checkpoint holds them all then, and whoever resumes has the same ones as who went on without a break.
        """
        pooled: dict[str, Tensor] = {}
        for rank, names in enumerate(world.gather(list(self._anchor_cache)) if world.size > 1 else []):
            fresh = [name for name in names if name not in pooled]
            latents = self.qformer.latents.new_empty(len(fresh), *self.qformer.latents.shape, device="cpu")
            if fresh and rank == world.rank:
                torch.stack([self._anchor_cache[name] for name in fresh], out=latents)
            if fresh:
                pooled |= zip(fresh, map(Tensor.clone, world.spread(latents, rank)), strict=True)
        self._anchor_cache = pooled or self._anchor_cache
        self._forget()

    def trainable(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        """Named parameters that learn, by part."""
        return {
            "encoder": self.backbone.adapter_parameters("encoder"),
            "qformer": list(self.qformer.named_parameters()),
        }

    def state(self) -> dict[str, Tensor]:
        """phi, and phi_0 once frozen, as one flat dictionary."""
        parts = {"encoder": self.backbone.adapter_state("encoder"), "qformer": self.qformer.state_dict()}
        if self._anchor is not None:
            parts |= {
                "anchor": self.backbone.adapter_state("anchor"),
                "anchor_qformer": self._anchor.state_dict(),
                "anchor_cache": {
                    f"{place:08d}-{digest}": latents
                    for place, (digest, latents) in enumerate(self._anchor_cache.items())
                },
            }
        return {f"{part}/{key}": value for part, values in parts.items() for key, value in values.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Read back what `state` gave."""
        parts: dict[str, dict[str, Tensor]] = {}
        for key, value in state.items():
            part, _, name = key.partition("/")
            parts.setdefault(part, {})[name] = value
        self.backbone.load_adapter_state("encoder", parts["encoder"])
        self.qformer.load_state_dict(parts["qformer"])
        if "anchor" in parts:
            if self._anchor is None:
                self.freeze_anchor()
            assert self._anchor is not None
            self.backbone.load_adapter_state("anchor", parts["anchor"])
            self._anchor.load_state_dict(parts["anchor_qformer"])
            cached = sorted(parts.get("anchor_cache", {}).items())
            self._anchor_cache = {name.partition("-")[2]: latents.cpu() for name, latents in cached}

    def _forget(self) -> None:
        """Drop the oldest anchors until the cache is small enough."""
        while sum(latents.nbytes for latents in self._anchor_cache.values()) > ANCHOR_CACHE_BYTES:
            del self._anchor_cache[next(iter(self._anchor_cache))]

    @property
    def backbone(self) -> Backbone:
        """The backbone whose encoder LoRA this composer trains."""
        return self._backbone[0]

    def _compress(self, pairs: Sequence[tuple[str, str, str]], role: str, qformer: QFormer) -> Tensor:
        """Latents (len(pairs), K, H) of (task, experience id, trace) pairs by an encoder role and its QFormer."""
        sequences = [self._memory_ids(task, trace) for task, _, trace in pairs]
        batches = list(_batches(sequences, self.config.encoder_batch_tokens))
        lacking = self.backbone.lockstep.turns(len(batches)) - len(batches)
        memories = []
        with self.backbone.role(role):
            for batch in batches:
                packed, paths = pack(batch, share=self.backbone.shares_prefixes)
                hidden = self.backbone.hidden(packed.to(self.backbone.device)).to(
                    qformer.latents.dtype
                )  # (T, H)
                memories.append(hidden[torch.cat(paths).to(hidden.device)])
            self.backbone.idle(lacking)
        if not memories:
            return qformer.latents.new_zeros(0, *qformer.latents.shape)
        lengths = torch.tensor([0] + [len(sequence) for sequence in sequences])
        return qformer(torch.cat(memories), lengths.cumsum(0).to(torch.int32))

    def _memory_ids(self, task: str, trace: str) -> list[int]:
        """Ids the encoder reads. A trace that is too long loses its end; the task is kept."""
        head = self.tokenizer(MEMORY_HEAD.format(task=task), add_special_tokens=False).input_ids
        body = self.tokenizer(trace, add_special_tokens=False).input_ids
        return (head + body)[: self.config.max_memory_tokens]  # pyright: ignore


def _digest(pair: tuple[str, str, str]) -> str:
    return sha256("\0".join(pair).encode()).hexdigest()


def _pairs(requests: Sequence[Request]) -> list[tuple[str, str, str]]:
    return [(task, item.id, item.trace) for task, experiences in requests for item in experiences]


def _per_request(
    requests: Sequence[Request], latents: dict[tuple[str, str, str], Tensor], empty: Tensor
) -> list[Tensor]:
    """Latents of each request's experiences, one after another: (J_b*K, H)."""
    return [
        torch.cat([empty, *(latents[task, item.id, item.trace] for item in experiences)])
        for task, experiences in requests
    ]


def _batches(sequences: Sequence[list[int]], budget: int) -> Iterator[list[list[int]]]:
    """The sequences, in order, in batches of at most `budget` tokens (or one sequence)."""
    batch: list[list[int]] = []
    left = budget
    for sequence in sequences:
        if batch and len(sequence) > left:
            yield batch
            batch, left = [], budget
        batch.append(sequence)
        left -= len(sequence)
    if batch:
        yield batch
