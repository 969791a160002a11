"""verl's distillation loss on one micro-batch: its own top-k mode, and ours with the tail. Needs verl 0.9 or newer.

python examples/verl_loss.py
"""

import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from peak_memory import peak_of
from torch import Tensor

SEQUENCES, PROMPT, RESPONSE, VOCABULARY, TOPK = 4, 32, 96, 64_000, 20


def micro_batch(teacher: list[Tensor]) -> dict[str, Any]:
    """What verl's agent loop and workers make of the teacher's answers."""
    best = [x.log_softmax(-1).topk(TOPK) for x in teacher]
    mask = torch.ones(SEQUENCES, RESPONSE, dtype=torch.int64)
    return {
        "teacher_ids": torch.nested.as_nested_tensor([x.indices.int() for x in best], layout=torch.jagged),
        "teacher_logprobs": torch.nested.as_nested_tensor([x.values for x in best], layout=torch.jagged),
        "prompts": torch.zeros(SEQUENCES, PROMPT, dtype=torch.int64),
        "responses": torch.zeros(SEQUENCES, RESPONSE, dtype=torch.int64),
        "attention_mask": torch.ones(SEQUENCES, PROMPT + RESPONSE, dtype=torch.int64),
        "response_mask": mask,
        "dp_size": 1,
        "batch_num_tokens": mask.sum().item(),
        "global_batch_size": SEQUENCES,
        "distillation_only": True,
    }


def step(mode: str) -> tuple[float, dict[str, Any]]:
    """Both calls that verl makes, and backward: logits to losses per token, then those to the loss."""
    from verl.trainer.distillation import losses  # pyright: ignore[reportMissingImports]

    from lopd_fast.integrations import verl

    verl.register()  # in a run: VERL_USE_EXTERNAL_MODULES=lopd_fast.integrations.verl_plugin
    options = SimpleNamespace(
        loss_mode=mode,
        topk=TOPK,
        loss_max_clamp=None,
        log_prob_min_clamp=None,
        use_task_rewards=False,
        use_policy_gradient=False,
        global_batch_info={},
    )
    config = SimpleNamespace(
        strategy="fsdp", loss_agg_mode="token-mean", loss_scale_factor=None, global_batch_info={}
    )
    distillation = SimpleNamespace(distillation_loss=options)
    torch.manual_seed(0)
    logits = 3 * torch.randn(1, SEQUENCES * (PROMPT + RESPONSE), VOCABULARY)
    data = micro_batch(list(logits[0].split(PROMPT + RESPONSE)))
    logits = (1.1 * logits).requires_grad_()
    per_token = losses.distillation_ppo_loss(config, distillation, data=data, student_logits=logits)
    lengths = data["teacher_ids"].offsets().diff().tolist()
    nested = {
        name: torch.nested.as_nested_tensor(list(x[0].split(lengths)), layout=torch.jagged)
        for name, x in per_token.items()
    }
    loss, metrics = losses.distillation_ppo_loss(config, distillation, model_output=nested, data=data)
    loss.backward()
    return loss.item(), {name: x for name, x in metrics.items() if isinstance(x, float)}


def main() -> None:
    """One step of each mode."""
    if find_spec("verl") is None:
        sys.exit("this example calls verl's own code: pip install verl, and run it again")
    tokens = SEQUENCES * (PROMPT + RESPONSE)
    print(f"one micro-batch of {tokens} tokens, vocabulary {VOCABULARY}, lists of {TOPK}")
    print(f"logits and their gradient: {2 * tokens * VOCABULARY * 4 / 2**20:,.0f} MiB")
    for mode in ("forward_kl_topk", "forward_kl_topk_tail", "reverse_kl_topk_tail"):
        (loss, metrics), peak = peak_of(step, mode)
        mass = metrics["distillation/teacher_mass"]
        print(f"{mode:21} loss {loss:.6f}   teacher's mass {mass:.3f}   peak memory {peak:,.0f} MiB")


if __name__ == "__main__":
    main()
