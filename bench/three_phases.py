"""The reference's LOPD step restated plainly: three phases, each of which loads its models and goes rollout by rollout.

1  encoder and teacher, no gradient: latents, full log-softmax, the teacher's top-k
2  student: full log-softmax, the loss on that support, AdamW, the whole student saved
3  encoder and teacher again, with gradient: loss, margin and anchor, AdamW, the composer saved

It is kept lean: phi and phi_0 are two adapters on one encoder, models are dropped at the end of their phase, and AdamW
keeps no state from one step to the next.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from lopd_fast.backbone import PROJECTIONS, checkpoint_layers
from lopd_fast.batch import Rollout
from lopd_fast.composer import MEMORY_HEAD
from lopd_fast.config import Config
from lopd_fast.qformer import qformer_ref
from lopd_fast.render import Renderer

FLOOR = -1e-7  # of the log of the listed mass
State = Mapping[str, Tensor]


class ThreePhases:
    """Holds theta, phi and phi_0 as flat dictionaries of tensors; models live within a phase."""

    def __init__(
        self, config: Config, renderer: Renderer, student: State, composer: State, beta: float, out: Path
    ) -> None:
        self.config, self.renderer, self.beta, self.out = config, renderer, beta, out
        self.student, self.composer = dict(student), dict(composer)
        self.disk_seconds = 0.0  # spent on reading and writing models so far

    def step(self, rollouts: Sequence[Rollout]) -> dict[str, Tensor]:
        """One step; returns the gradients of theta and phi by name, before clipping."""
        supports = self._supports(rollouts)
        gradients, student_logprobs = self._distil(rollouts, supports)
        return gradients | self._compose(rollouts, supports, student_logprobs)

    # --- phases -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _supports(self, rollouts: Sequence[Rollout]) -> list[tuple[Tensor, Tensor]]:
        """The teacher's top-k ids and their log-probs for every rollout."""
        encoder, teacher = self._model("encoder"), self._model()

        def support(rollout: Rollout) -> tuple[Tensor, Tensor]:
            latents = self._latents(encoder, _part(self.composer, "qformer"), rollout)
            listed, ids = self._teacher_logprobs(teacher, rollout, latents).topk(self.config.loss.k)
            return ids, listed

        return [support(rollout) for rollout in rollouts]

    def _distil(
        self, rollouts: Sequence[Rollout], supports: Sequence[tuple[Tensor, Tensor]]
    ) -> tuple[dict[str, Tensor], list[tuple[Tensor, Tensor]]]:
        """The student's step; also its log-probs on the supports and of the sampled tokens, as constants."""
        student = self._model("student")
        learns = {name: p for name, p in student.named_parameters() if p.requires_grad}
        tokens = sum(len(rollout.response_ids) for rollout in rollouts)

        def backward(rollout: Rollout, ids: Tensor, teacher_logprobs: Tensor) -> tuple[Tensor, Tensor]:
            prompt, _ = self.renderer.prompt(rollout.messages)
            sequence = torch.tensor([prompt + rollout.response_ids], device=student.device)
            logprobs = student(input_ids=sequence).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
            listed = logprobs.gather(-1, ids)  # of (n, V)
            (_divergence(listed, teacher_logprobs).sum() / tokens).backward()
            sampled = torch.tensor(rollout.response_ids, device=student.device)[:, None]
            return listed.detach(), logprobs.detach().gather(-1, sampled)[:, 0]

        kept = [backward(rollout, *support) for rollout, support in zip(rollouts, supports, strict=True)]
        gradients = _gradients(learns, "student")
        self._update(learns)
        started = time.perf_counter()
        student.save_pretrained(self.out / "student")
        self.disk_seconds += time.perf_counter() - started
        return gradients, kept

    def _compose(
        self,
        rollouts: Sequence[Rollout],
        supports: Sequence[tuple[Tensor, Tensor]],
        student_logprobs: Sequence[tuple[Tensor, Tensor]],
    ) -> dict[str, Tensor]:
        """The composer's step, on a second pass of the teacher."""
        objective = self.config.objective
        encoder, teacher = self._model("encoder", "anchor"), self._model()
        qformer = {
            name: tensor.clone().requires_grad_() for name, tensor in _part(self.composer, "qformer").items()
        }
        learns = {name: p for name, p in encoder.named_parameters() if p.requires_grad}

        def backward(rollout: Rollout, ids: Tensor, listed: Tensor, sampled: Tensor) -> None:
            _switch(encoder, "anchor")
            with torch.no_grad():
                first = self._latents(encoder, _part(self.composer, "anchor_qformer"), rollout)
            _switch(encoder, "encoder")
            latents = self._latents(encoder, qformer, rollout)
            logprobs = self._teacher_logprobs(teacher, rollout, latents)
            labels = torch.tensor(rollout.response_ids, device=logprobs.device)[:, None]
            gain = rollout.advantage * (logprobs.gather(-1, labels)[:, 0] - sampled).mean()
            loss = _divergence(listed, logprobs.gather(-1, ids)).mean()
            loss = loss + self.beta * (objective.margin - gain)
            loss = loss + objective.anchor * (latents - first).square().mean()
            (loss / len(rollouts)).backward()

        for rollout, (ids, _), logprobs in zip(rollouts, supports, student_logprobs, strict=True):
            backward(rollout, ids, *logprobs)
        gradients = _gradients(learns, "encoder") | _gradients(qformer, "qformer")
        self._update(learns, qformer)
        save_file(
            {name: p.detach().contiguous() for name, p in {**learns, **qformer}.items()},
            self.out / "composer.safetensors",
        )
        return gradients

    # --- parts ------------------------------------------------------------------------------------------------

    def _model(self, *adapters: str) -> PreTrainedModel:
        """The backbone from its folder, with LoRAs on it, the first of them active and learning."""
        settings, started = self.config.model, time.perf_counter()
        model: Any = AutoModelForCausalLM.from_pretrained(
            settings.path, dtype=getattr(torch, settings.dtype), local_files_only=True
        )
        model.to(settings.device).requires_grad_(False).eval()
        if settings.device == "cpu":  # a copy of its own, as on a device: models would share the file's pages
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
        for adapter in adapters:
            lora = self.config.student.lora if adapter == "student" else self.config.composer.lora
            targets: list[str] = list(PROJECTIONS)
            inject_adapter_in_model(
                LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets), model, adapter
            )
            state = self.student if adapter == "student" else _part(self.composer, adapter)
            set_peft_model_state_dict(model, dict(state), adapter_name=adapter)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.float()
        if adapters:
            _switch(model, adapters[0])
        if settings.gradient_checkpointing:
            checkpoint_layers(model)
        self.disk_seconds += time.perf_counter() - started
        return model

    def _latents(self, encoder: PreTrainedModel, qformer: State, rollout: Rollout) -> Tensor:
        """(J*K, H), one text at a time."""
        config, tokenizer = self.config.composer, self.renderer.tokenizer
        latents = []
        for experience in rollout.experiences:
            text = MEMORY_HEAD.format(task=rollout.task.text), experience.trace
            ids = sum((tokenizer(part, add_special_tokens=False).input_ids for part in text), [])  # pyright: ignore
            body: Any = encoder.get_decoder()
            memory = body(input_ids=torch.tensor([ids], device=encoder.device)).last_hidden_state[0].float()
            ends = torch.tensor([0, len(ids)], dtype=torch.int32)
            heads = config.heads or encoder.config.get_text_config().num_attention_heads
            latents.append(qformer_ref(qformer, memory, ends, heads=heads, depth=config.depth)[0])
        return torch.cat(latents)

    def _teacher_logprobs(self, teacher: PreTrainedModel, rollout: Rollout, latents: Tensor) -> Tensor:
        """Full log-softmax (n, V) fp32 of the teacher at the response's tokens."""
        prompt, slot = self.renderer.prompt(rollout.messages, len(latents))
        ids = torch.tensor(prompt + rollout.response_ids, device=teacher.device)
        words: Any = teacher.get_input_embeddings()
        embeddings = words(ids)
        after = embeddings[slot + len(latents) :]
        embeddings = torch.cat([embeddings[:slot], latents.to(embeddings.dtype), after])
        logits = teacher(inputs_embeds=embeddings[None]).logits[0, len(prompt) - 1 : -1]
        return logits.float().log_softmax(-1)

    def _update(self, *groups: Mapping[str, Tensor]) -> None:
        parameters = [parameter for group in groups for parameter in group.values()]
        nn.utils.clip_grad_norm_(parameters, self.config.optim.clip)
        torch.optim.AdamW(parameters, lr=self.config.optim.lr, weight_decay=0.0).step()


def _switch(model: PreTrainedModel, adapter: str) -> None:
    """Make one LoRA the active one; it alone learns, unless it is the anchor."""
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.set_adapter(adapter)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".encoder." in name or ".student." in name)


def _divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Reverse KL (n,) of listed log-probs (n, k) with the tail that they leave."""

    def with_tail(logprobs: Tensor) -> Tensor:
        mass = logprobs.logsumexp(-1, keepdim=True).clamp(max=FLOOR)
        return torch.cat([logprobs, (-mass.expm1()).log()], -1)

    s, t = with_tail(student), with_tail(teacher)
    return (s.exp() * (s - t)).sum(-1)


def _part(state: State, name: str) -> dict[str, Tensor]:
    return {key.removeprefix(f"{name}/"): value for key, value in state.items() if key.startswith(f"{name}/")}


def _gradients(parameters: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    assert all(p.grad is not None and math.isfinite(float(p.grad.sum())) for p in parameters.values()), part
    return {f"{part}/{name}": p.grad.clone() for name, p in parameters.items() if p.grad is not None}
