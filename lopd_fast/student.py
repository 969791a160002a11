"""The student theta: a LoRA on the shared backbone, or a model of its own whose every weight learns."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lopd_fast.backbone import Backbone, Head, checkpoint_layers, copy_weights, head_of, plain_copy
from lopd_fast.batch import Side
from lopd_fast.config import StudentConfig
from lopd_fast.file_mode import take_mode
from lopd_fast.lockstep import Lockstep
from lopd_fast.packed_forward import packed_hidden
from lopd_fast.sharding import Body, shard_learning, whole


class Student:
    """The policy that is trained and, in the end, the only thing that is deployed."""

    def __init__(self, backbone: Backbone, config: StudentConfig, merge_for_rollout: bool = True) -> None:
        self.backbone = backbone
        self.mode = config.mode
        self._merge = merge_for_rollout
        self._rollout_copy: PreTrainedModel | None = None
        self._own: PreTrainedModel | None = None
        self._body: Body | None = None  # how to run it where its weights are in parts
        self._lockstep = Lockstep()
        if self.mode == "lora":
            backbone.add_adapter("student", config.lora)
        else:
            own = plain_copy(backbone.model, lambda: iter(backbone.model.state_dict().items()))
            self._own = own.float().requires_grad_(True)  # steps of 1e-5 vanish in bf16 weights
            if backbone.gradient_checkpointing:
                checkpoint_layers(self._own)

    def shard(self, lockstep: Lockstep) -> None:
        """Leave each process a part of the student's own weights."""
        assert self._own is not None, "an adapter is whole on every process"
        self._body, self._lockstep = shard_learning(self._own, lockstep.world.size), lockstep

    def hidden(self, side: Side) -> Tensor:
        """Hidden states (N, H) at the supervised rows of the student's view."""
        if self._own is not None:
            with self.backbone.saving():
                states = packed_hidden(self._own, side.packed, body=self._body, lockstep=self._lockstep)
                return states[side.rows]
        with self.backbone.role("student"):
            return self.backbone.hidden(side.packed)[side.rows]

    @property
    def head(self) -> Head:
        """The student's output head; under a LoRA it is the backbone's own."""
        return self.backbone.head if self._own is None else head_of(self._own)

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """Named parameters that learn."""
        return (
            self.backbone.adapter_parameters("student")
            if self._own is None
            else list(self._own.named_parameters())
        )

    def state(self) -> dict[str, Tensor]:
        """theta."""
        if self._own is None:
            return self.backbone.adapter_state("student")
        return {key: value.detach() for key, value in self._own.named_parameters()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Read back what `state` gave."""
        if self._own is None:
            self.backbone.load_adapter_state("student", state)
        else:
            copy_weights(self._own, iter(state.items()))

    @contextmanager
    def policy(self) -> Iterator[PreTrainedModel]:
        """The model to sample from, up to date with theta.

        By default it is a merged copy of the LoRA student: unmerged adapters nearly double the time of decoding.
        """
        if self._lockstep.active:
            yield plain_copy(self.backbone.model, self._whole_state, blank=True)
        elif self._own is not None:
            yield self._own
        elif self.backbone.lockstep.active:
            with self.backbone.policy("student") as model:
                yield model
        elif self._merge:
            yield self._merged_copy()
        else:
            with self.backbone.role("student"), self.backbone.precision():
                yield self.backbone.model

    def save(self, folder: Path, tokenizer: PreTrainedTokenizerBase, write: bool = True) -> None:
        """Write a plain model folder that transformers loads by itself; with `write` off only help others to."""
        if self._own is None:
            model = plain_copy(self.backbone.model, lambda: self.backbone.merged_state("student"))
        else:
            model = plain_copy(self.backbone.model, self._whole_state)
        if write:
            model.save_pretrained(folder)
            take_mode(folder.glob("*.safetensors"), folder / "config.json")
            tokenizer.save_pretrained(folder)

    def _whole_state(self) -> Iterator[tuple[str, Tensor]]:
        """theta in full mode, one whole tensor at a time."""
        return ((name, whole(tensor)) for name, tensor in self.state().items())

    @torch.no_grad()
    def _merged_copy(self) -> PreTrainedModel:
        if self._rollout_copy is None:
            self._rollout_copy = plain_copy(
                self.backbone.model, lambda: self.backbone.merged_state("student")
            )
        else:
            copy_weights(self._rollout_copy, self.backbone.merged_state("student"))
        return self._rollout_copy
