"""What each of several processes checks: a step over all of them is the step of one. A module, to be spawned."""

from collections.abc import Sequence
from typing import Any

import test_step
import tiny
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lopd_fast import packed_forward, prefix_tree
from lopd_fast.batch import Rollout
from lopd_fast.build import Parts
from lopd_fast.prefix_tree import MASKED_TOKENS
from lopd_fast.processes import World
from lopd_fast.sharding import whole
from lopd_fast.trainer import Trainer

NUMBERS = ("loss", "kl", "delta", "reward", "anchor", "student_mass", "teacher_mass", "entropy", "tokens")
NUMBERS += ("student_grad_norm", "composer_grad_norm", "response_tokens", "beta")


# What is replicated and what is sharded; with them what makes the processes' runs differ in number.
CASES: dict[str, dict[str, Any]] = {
    "lora": {},
    "sharded": {"words": ["model.shard=true", "composer.encoder_batch_tokens=40"], "masked_tokens": 0},
    "full, sharded": {
        "words": ["student.mode=full", "model.shard=true", "model.gradient_checkpointing=true"],
    },
}
MORE: dict[str, dict[str, Any]] = {
    "full": {"words": ["student.mode=full"], "kind": "qwen3", "tie": False},
    "sharded, recomputed": {"words": ["model.shard=true", "model.gradient_checkpointing=true"]},
    "full, one by one": {"words": ["student.mode=full", "model.shard=true"], "masked_tokens": 0},
    "sharded, untied": {"words": ["model.shard=true"], "kind": "qwen3", "tie": False},
    "frozen": {"words": ["model.shard=true", "objective.freeze_composer=true"]},
    "no latents": {"words": ["model.shard=true", "objective.use_latents=false"]},
    "full, tied": {"words": ["student.mode=full"]},
}


def one_and_four() -> list[Rollout]:
    """A token for one process, four for the other."""
    e = tiny.experiences()
    return [tiny.rollout(1, [1], 1.0, [e[0], e[1]]), tiny.rollout(2, [1, 1, 1, 1], 0.0, [e[1], e[2], e[3]])]


def only_one() -> list[Rollout]:
    """Nothing for the other process."""
    return [tiny.rollout(1, [1, 1, 1], 1.0, tiny.experiences()[:2])]


STEPS = {"uneven": one_and_four, "nothing": only_one, "ragged": test_step.ragged_rollouts}


def moved(world: World, *words: str, **options: Any) -> Parts:
    """`test_step.moved_parts` over the processes of `world`."""
    parts = test_step.doubled(tiny.parts(*words, world=world, **options))
    tiny.stir(list(tiny.learning(parts).values()), seed=1, size=0.05)
    parts.shard()
    parts.composer.freeze_anchor()
    for _, parameter in parts.backbone.adapter_parameters("anchor"):
        parameter.data = parameter.data.double()
    phi = [value for name, value in tiny.learning(parts).items() if not name.startswith("student/")]
    tiny.stir(phi, seed=2, size=0.05)
    return parts


def near(found: Any, expected: Any, what: str) -> None:
    """The same to 1e-5 of the expected one's norm."""
    found, expected = torch.as_tensor(found).double(), torch.as_tensor(expected).double()
    error, size = float((found - expected).norm()), float(expected.norm())
    assert error <= 1e-5 * size, f"{what}: off by {error} of {size}"


def check_equal(
    world: World, words: Sequence[str] = (), masked_tokens: int = MASKED_TOKENS, **options: Any
) -> None:
    """Theta, phi, beta and metrics after every step are those of one process, and the same bits on all."""
    prefix_tree.MASKED_TOKENS = packed_forward.MASKED_TOKENS = masked_tokens
    words = ["objective.beta_init=0.7", "optim.lr=1e-3", "train.micro_batch_tokens=150", *words]
    alone = test_step.trainer_of(moved(World(), *words, **options))
    together = test_step.trainer_of(moved(world, *words, **options))
    check_parts(together, "student.mode=full" in words, "model.shard=true" in words)
    for step, make in STEPS.items():
        expected, found = alone.update(make()), together.update(make())
        for number in NUMBERS:
            near(getattr(found, number), getattr(expected, number), f"{step}: {number}")
        near(together.beta, alone.beta, f"{step}: beta")
        same_everywhere(world, torch.tensor(together.beta, dtype=torch.float64), f"{step}: beta")
        of_one = tiny.learning(alone.parts)
        for name, tensor in tiny.learning(together.parts).items():
            tensor = whole(tensor.detach())
            near(tensor, of_one[name].detach(), f"{step}: {name}")
            same_everywhere(world, tensor, f"{step}: {name}")


def check_parts(trainer: Trainer, full: bool, shard: bool) -> None:
    """What should be in parts is, and nothing else; a tied head is tied still."""
    own = dict(trainer.parts.student._own.named_parameters()) if trainer.parts.student._own else {}
    assert all(isinstance(tensor, DTensor) for tensor in own.values()) and bool(own) == full
    assert all(isinstance(tensor, DTensor) == full for tensor in trainer.theta)
    assert not any(isinstance(tensor, DTensor) for tensor in trainer.phi)
    model = trainer.parts.backbone.model
    for name, tensor in model.named_parameters():
        in_block = ".layers." in name and "lora_" not in name
        assert isinstance(tensor, DTensor) == (shard and in_block), name
    if own and model.config.tie_word_embeddings:
        assert (
            "lm_head.weight" not in own
            and trainer.parts.student.head.weight is own["model.embed_tokens.weight"]
        )


def same_everywhere(world: World, tensor: Tensor, what: str) -> None:
    other = world.spread(tensor.clone())
    assert torch.equal(other, tensor), f"{what} differs between processes"
