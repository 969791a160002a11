"""A step of latent on-policy self-distillation: the reference's three phases, and one fused loss in their place.

python examples/reference_lopd.py
"""

from dataclasses import dataclass
from typing import Any

import torch
from peak_memory import peak_of
from torch import Tensor
from torch.nn.functional import linear
from transformers import LlamaConfig, LlamaForCausalLM

from lopd_fast.integrations.reference import rollout_loss, topk_reverse_kl

VOCABULARY, WIDTH, LATENTS, PROMPT, TOPK = 64_000, 64, 8, 16, 20
LENGTHS, REWARDS = (320, 192), (1.0, 0.0)  # response tokens and reward of each rollout
BETA, MARGIN, ANCHOR = 0.5, 0.05, 0.2


def tiny_model() -> LlamaForCausalLM:
    """A random Llama of two layers: next to nothing but its head."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.2,
        )
    )


@dataclass
class Step:
    """The student (theta), the frozen teacher, the latents (phi) and their anchor, and rollouts of token ids."""

    student: LlamaForCausalLM
    teacher: LlamaForCausalLM
    latents: Tensor  # (L, D)
    anchor: Tensor  # (L, D)
    rollouts: list[Tensor]

    @classmethod
    def make(cls) -> "Step":
        student, teacher = tiny_model(), tiny_model()
        teacher.requires_grad_(False)
        latents = torch.randn(LATENTS, WIDTH)
        rollouts = [torch.randint(VOCABULARY, (PROMPT + n,)) for n in LENGTHS]
        return cls(student, teacher, latents.clone().requires_grad_(), latents + 0.1, rollouts)

    def student_hidden(self, ids: Tensor) -> Tensor:
        """Rows that predict the response."""
        return self.student.model(ids[None]).last_hidden_state[0, PROMPT - 1 : -1]

    def teacher_hidden(self, ids: Tensor) -> Tensor:
        """The same rows of the teacher, which reads the latents ahead of the prompt."""
        embeds = torch.cat([self.latents, self.teacher.model.embed_tokens(ids)])
        hidden = self.teacher.model(inputs_embeds=embeds[None]).last_hidden_state[0]
        return hidden[LATENTS + PROMPT - 1 : -1]

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Of the student's head, and of the latents."""
        assert self.student.lm_head.weight.grad is not None and self.latents.grad is not None
        return self.student.lm_head.weight.grad, self.latents.grad


def three_phases() -> tuple[float, float, Any]:
    """Teacher's top-k; the student's loss; the composer's loss on a second teacher pass. Full log-softmaxes in fp32."""
    step = Step.make()
    tokens, kept, kl_total, delta_total = sum(LENGTHS), [], 0.0, 0.0
    for ids in step.rollouts:
        with torch.no_grad():
            logits = linear(step.teacher_hidden(ids), step.teacher.lm_head.weight)
            values, support = logits.float().log_softmax(-1).topk(TOPK)
        logprobs = linear(step.student_hidden(ids), step.student.lm_head.weight).float().log_softmax(-1)
        kl, _ = topk_reverse_kl(logprobs.gather(-1, support), values)
        (kl / tokens).backward()
        kl_total += kl.item()
        sampled = logprobs.gather(-1, ids[PROMPT:, None])
        kept.append((support, logprobs.gather(-1, support).detach(), sampled[:, 0].detach()))
    for ids, reward, (support, student_listed, student_sampled) in zip(
        step.rollouts, REWARDS, kept, strict=True
    ):
        logprobs = linear(step.teacher_hidden(ids), step.teacher.lm_head.weight).float().log_softmax(-1)
        kl, count = topk_reverse_kl(student_listed, logprobs.gather(-1, support))
        sampled = logprobs.gather(-1, ids[PROMPT:, None])[:, 0]
        delta = (2 * reward - 1) * (sampled - student_sampled).mean()
        anchor = (step.latents - step.anchor).square().mean()
        ((kl / count + BETA * (MARGIN - delta) + ANCHOR * anchor) / len(step.rollouts)).backward()
        delta_total += delta.item() * count
    return kl_total / tokens, delta_total / tokens, step.gradients()


def one_loss() -> tuple[float, float, Any]:
    """The same from hidden states: one teacher pass, no logits."""
    step = Step.make()
    tokens, kl_total, delta_total = sum(LENGTHS), 0.0, 0.0
    for ids, reward in zip(step.rollouts, REWARDS, strict=True):
        out = rollout_loss(
            step.student_hidden(ids),
            step.student.lm_head.weight,
            step.teacher_hidden(ids),
            step.teacher.lm_head.weight,
            ids[PROMPT:],
            reward=reward,
            beta=BETA,
            margin=MARGIN,
            anchor_lambda=ANCHOR,
            latents=step.latents,
            anchor_latents=step.anchor,
            top_k=TOPK,
            global_tokens=tokens,
            n_rollouts=len(step.rollouts),
        )
        out.loss.backward()
        kl_total += out.kl_sum.item()
        delta_total += out.delta.item() * out.n_tokens
    return kl_total / tokens, delta_total / tokens, step.gradients()


def main() -> None:
    """Run both from the same start, and compare."""
    print(f"one step of {sum(LENGTHS)} tokens in {len(LENGTHS)} rollouts, vocabulary {VOCABULARY}")
    gradients = []
    for name, function in (("three phases", three_phases), ("one loss", one_loss)):
        (kl, delta, grads), peak = peak_of(function)
        gradients.append(grads)
        print(f"{name:13} KL {kl:.6f}   margin {delta:+.6f}   peak memory {peak:,.0f} MiB")
    for name, a, b in zip(("student's head", "latents"), *gradients, strict=True):
        print(f"gradients of the {name} differ by {(a - b).norm() / a.norm():.1e}")


if __name__ == "__main__":
    main()
