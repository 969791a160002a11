"""The composer phi: retrieved experiences -> latent tokens that condition the frozen teacher.

encoder: the frozen backbone with the "encoder" LoRA reads "task + past trajectory" and gives its last hidden states;
compressor: a QFormer turns each memory, whatever its length, into K latent tokens. One task's latents are those of
its J experiences in retrieval order, (J*K, H).
"""

from collections.abc import Iterator, Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from lopd_fast.backbone import Backbone
from lopd_fast.bank import Experience
from lopd_fast.config import ComposerConfig
from lopd_fast.qformer import QFormer

MEMORY_HEAD = "Task to solve:\n{task}\n\nReference past trajectory:\n"
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
        self._anchor_cache: dict[tuple[str, str, str], Tensor] = {}

    def forward(self, requests: Sequence[Request]) -> list[Tensor]:
        """Latents of every request: (J_b*K, H) fp32, J_b >= 0 being the number of its experiences."""
        pairs = _pairs(requests)
        if not pairs:
            return [torch.zeros(0, self.backbone.hidden_size, device=self.backbone.device) for _ in requests]
        distinct = list(dict.fromkeys(pairs))
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
        """c_phi0 of every request, computed once per (task, experience) and kept.

        The cache holds K*H fp32 numbers a pair, on the CPU.
        """
        assert self._anchor is not None, "freeze_anchor comes first"
        pairs = _pairs(requests)
        # One by one: a resumed run, whose cache is empty, gets the same bits, whatever else a step asks for.
        for pair in dict.fromkeys(pairs):
            if pair not in self._anchor_cache:
                self._anchor_cache[pair] = self._compress([pair], "anchor", self._anchor)[0].cpu()
        device = self.backbone.device
        found = {pair: self._anchor_cache[pair].to(device) for pair in set(pairs)}
        return _per_request(requests, found, torch.zeros(0, self.backbone.hidden_size, device=device))

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
            self._anchor_cache.clear()

    @property
    def backbone(self) -> Backbone:
        """The backbone whose encoder LoRA this composer trains."""
        return self._backbone[0]

    def _compress(self, pairs: Sequence[tuple[str, str, str]], role: str, qformer: QFormer) -> Tensor:
        """Latents (len(pairs), K, H) of (task, experience id, trace) pairs by an encoder role and its QFormer."""
        sequences = [self._memory_ids(task, trace) for task, _, trace in pairs]
        memories: list[Tensor] = [torch.empty(0)] * len(sequences)
        with self.backbone.role(role):
            for rows in _by_length(sequences, self.config.encoder_batch_tokens):
                ids, mask = _pad([sequences[row] for row in rows], self.backbone.device)
                hidden = self.backbone.hidden(mask, ids=ids).float()  # (rows, T, H)
                for index, row in enumerate(rows):
                    memories[row] = hidden[index, : len(sequences[row])]
        lengths = torch.tensor([0] + [len(sequence) for sequence in sequences])
        return qformer(torch.cat(memories), lengths.cumsum(0).to(torch.int32))

    def _memory_ids(self, task: str, trace: str) -> list[int]:
        """Ids the encoder reads. A trace that is too long loses its end; the task is kept."""
        head = self.tokenizer(MEMORY_HEAD.format(task=task), add_special_tokens=False).input_ids
        body = self.tokenizer(trace, add_special_tokens=False).input_ids
        return (head + body)[: self.config.max_memory_tokens]  # pyright: ignore


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


def _by_length(sequences: Sequence[Sequence[int]], budget: int) -> Iterator[list[int]]:
    """Row numbers in batches of like length, each at most `budget` padded tokens (or one row)."""
    batch: list[int] = []
    for row in sorted(range(len(sequences)), key=lambda row: len(sequences[row])):
        if batch and (len(batch) + 1) * len(sequences[row]) > budget:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _pad(sequences: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Right-padded ids (B, T) and their mask (B, T) bool."""
    longest = max(len(sequence) for sequence in sequences)
    ids = torch.zeros(len(sequences), longest, dtype=torch.int64)
    mask = torch.zeros(len(sequences), longest, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(sequence)
        mask[row, : len(sequence)] = True
    return ids.to(device), mask.to(device)
