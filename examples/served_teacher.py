"""A teacher behind an inference server: its top-k log-probs as vLLM returns them, and a student that learns from them.

python examples/served_teacher.py
"""

from typing import Any

import torch
from peak_memory import peak_of
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from lopd_fast import fused_linear_topk_tail_kl, served_topk

VOCABULARY, SEQUENCES, TOKENS, TOPK, STEPS = 64_000, 4, 160, 20, 3


def tiny_model(seed: int) -> LlamaForCausalLM:
    """A random Llama of two layers: next to nothing but its head."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.2,
        )
    )


def server() -> tuple[Tensor, list[Any]]:
    """Completions, and for each token after the first what a vLLM teacher sends: {id: {"logprob": ...}}."""
    teacher = tiny_model(seed=1)
    ids = torch.randint(VOCABULARY, (SEQUENCES, TOKENS))
    answer: list[Any] = []
    with torch.no_grad():
        for sequence in ids:
            best = teacher(sequence[None]).logits[0, :-1].log_softmax(-1).topk(TOPK)
            lists = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            answer += [{str(i): {"logprob": v} for i, v in zip(*pair, strict=True)} for pair in lists]
    return ids, answer


def plain_loss(hidden: Tensor, head: Tensor, listed: Tensor, logprobs: Tensor) -> Tensor:
    """The same loss by its formula, from full logits: for comparison."""
    s = (hidden @ head.T).float().log_softmax(-1)
    rest = torch.ones_like(s, dtype=torch.bool).scatter(-1, listed, False)
    tail = s.masked_fill(~rest, -torch.inf).logsumexp(-1, keepdim=True)
    s = torch.cat([s.gather(-1, listed), tail], -1)
    t = torch.cat([logprobs, torch.log1p(-logprobs.exp().sum(-1, keepdim=True))], -1)
    return (s.exp() * (s - t)).sum(-1).mean()


def train(fused: bool, ids: Tensor, answer: list[Any]) -> list[float]:
    """Losses of a few steps of reverse KL."""
    student = tiny_model(seed=0)
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)
    listed, logprobs = served_topk(answer)  # (N, k) both
    losses = []
    for _ in range(STEPS):
        hidden = (
            student.model(ids).last_hidden_state[:, :-1].flatten(0, 1)
        )  # row n predicts the token of list n
        head = student.lm_head.weight
        if fused:
            loss = fused_linear_topk_tail_kl(hidden, head, teacher_topk=(listed, logprobs)).loss
        else:
            loss = plain_loss(hidden, head, listed, logprobs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Train twice from the same start, and compare."""
    ids, answer = server()
    print(f"{STEPS} steps of {len(answer)} tokens, vocabulary {VOCABULARY}, lists of {TOPK}")
    for name, fused in (("from logits", False), ("fused", True)):
        losses, peak = peak_of(train, fused, ids, answer)
        print(f"{name:12} losses {' '.join(f'{x:.5f}' for x in losses)}   peak memory {peak:,.0f} MiB")


if __name__ == "__main__":
    main()
