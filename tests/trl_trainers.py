"""TRL's trainers on a tiny model, and their training with their own loss and with the fused one, compared."""

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
pytest.importorskip("trl", minversion="1.16")

import tiny  # noqa: E402
import transformers  # noqa: E402
from datasets import Dataset  # noqa: E402
from peft import LoraConfig  # noqa: E402
from trl.experimental.gkd import GKDConfig, GKDTrainer  # noqa: E402
from trl.experimental.sdft import SDFTConfig, SDFTTrainer  # noqa: E402
from trl.experimental.sdpo import SDPOConfig, SDPOTrainer  # noqa: E402
from trl.experimental.utils import DataCollatorForChatML  # noqa: E402
from trl.trainer.distillation_config import DistillationConfig  # noqa: E402
from trl.trainer.distillation_trainer import DistillationTrainer  # noqa: E402

from lopd_fast.integrations.trl import use_fused_loss  # noqa: E402

STEPS, ROWS = 5, 4  # optimizer steps, sequences in each
SAMPLING = {"max_completion_length": 5, "generation_kwargs": {"sequence_bias": [[[tiny.END], 4.0]]}}
LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")


def first_row_masked(batch: dict[str, Any]) -> dict[str, Any]:
    batch["completion_mask"][0] = 0
    return batch


class Distillation(DistillationTrainer):
    def _generate_and_score_completions(self, inputs: Any) -> Any:
        return first_row_masked(super()._generate_and_score_completions(inputs))


class SDFT(SDFTTrainer):
    def sample_rollouts(self, inputs: Any) -> Any:
        return first_row_masked(super().sample_rollouts(inputs))  # pyright: ignore[reportArgumentType]


class HideMarked(DataCollatorForChatML):
    """Leaves nothing to learn of the marked examples."""

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = super().__call__(examples)
        batch["labels"][torch.tensor([example["hidden"] for example in examples])] = -100
        return batch


def settings(config: Any, folder: Any, accumulation: int, **options: Any) -> Any:
    # Not Adam by default: it divides a gradient by its size, and so makes large what rounding leaves of one near 0.
    options = {"bf16": False, "optim": "sgd", "learning_rate": 2e-2} | options
    return config(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=ROWS // accumulation,
        gradient_accumulation_steps=accumulation,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )


def prompts(**fields: Any) -> Dataset:
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": "Say" + " so" * i}], **fields} for i in range(ROWS * STEPS)]
    )


def distillation(folder: Any, accumulation: int, peft: bool, student: Any = None, **options: Any) -> Any:
    return Distillation(
        model=student or tiny.model(),
        teacher_model=tiny.model("qwen3"),
        args=settings(DistillationConfig, folder, accumulation, **SAMPLING, **options),
        train_dataset=prompts(),
        processing_class=tiny.tokenizer(),
        peft_config=copy.deepcopy(LORA) if peft else None,
    )


def sdpo(folder: Any, accumulation: int, peft: bool, student: Any = None, **options: Any) -> Any:
    """The first of two attempts succeeds: it is the other's demonstration and has none, so nothing to learn."""
    options = {"distillation_mode": "topk_logits", "distillation_topk": 7, "num_generations": 2} | options
    options.setdefault("teacher_model_kind", "base" if peft else "live")
    return SDPOTrainer(
        model=student or tiny.model(),
        reward_funcs=[lambda completions, **_: [float(i % 2 == 0) for i in range(len(completions))]],
        args=settings(SDPOConfig, folder, accumulation, **SAMPLING, **options),
        train_dataset=prompts(),
        processing_class=tiny.tokenizer(),
        peft_config=copy.deepcopy(LORA) if peft else None,
    )


def sdft(folder: Any, accumulation: int, peft: bool, student: Any = None, **options: Any) -> Any:
    options = {"distillation_topk": 7, "num_generations": 1} | options
    options.setdefault("teacher_model_kind", "base" if peft else "live")
    return SDFT(
        model=student or tiny.model(tie=False),
        args=settings(SDFTConfig, folder, accumulation, **SAMPLING, **options),
        train_dataset=prompts(privileged_context="The answer is ab."),
        processing_class=tiny.tokenizer(),
        peft_config=copy.deepcopy(LORA) if peft else None,
    )


def gkd(folder: Any, accumulation: int, peft: bool, student: Any = None, **options: Any) -> Any:
    examples = [
        {
            "messages": [
                {"role": "user", "content": "Say ab."},
                {"role": "assistant", "content": "ab" * (1 + i % 5)},
            ],
            "hidden": i % ROWS == 2,
        }
        for i in range(ROWS * STEPS)
    ]
    options = {"lmbda": 0.0, "max_length": 64} | options
    return GKDTrainer(
        model=student or tiny.model(),
        teacher_model=tiny.model("qwen3"),
        args=settings(GKDConfig, folder, accumulation, max_new_tokens=5, **options),
        data_collator=HideMarked(tokenizer=tiny.tokenizer(), max_length=64),
        train_dataset=Dataset.from_list(examples),
        processing_class=tiny.tokenizer(),
        peft_config=copy.deepcopy(LORA) if peft else None,
    )


Make = Callable[..., Any]
ALL: list[Make] = [distillation, sdpo, sdft, gkd]
UNLIKE = ("time", "second", "runtime", "topk_mass")  # what a log may differ in, or have more of


@dataclass
class Training:
    """What a run of a trainer was."""

    start: dict[str, Tensor]
    end: dict[str, Tensor]
    logged: list[dict[str, float]]
    micro_batches: list[list[int]]  # supervised tokens of each sequence


def supervised(batch: dict[str, Any]) -> list[int]:
    """Tokens of each sequence that the loss is about."""
    if "labels" in batch:
        return (batch["labels"][:, 1:] != -100).sum(1).tolist()
    counts = batch["completion_mask"].sum(1)
    taught = batch.get("self_distillation_mask")  # SDPO: where there is a demonstration
    return (counts if taught is None else counts * taught).long().tolist()


def trained(make: Make, folder: Any, *, fused: bool, **options: Any) -> Training:
    transformers.set_seed(0)
    trainer = make(folder, **options)
    if fused:
        use_fused_loss(trainer)
    loss, seen = trainer.compute_loss, []

    def noted(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(supervised(inputs))
        return loss(model, inputs, *args, **kwargs)

    trainer.compute_loss = noted
    start = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    end = {name: p.detach() for name, p in trainer.model.named_parameters()}
    return Training(start, end, trainer.state.log_history, seen)


def assert_same_training(make: Make, folder: Any, **options: Any) -> Training:
    """Every number that is logged, and every parameter, after five steps. Returns the fused run."""
    usual, fused = (trained(make, folder, fused=on, **options) for on in (False, True))
    moved = max(float((usual.end[name] - start).abs().max()) for name, start in usual.start.items())
    assert moved > 1e-4, "nothing was learned"
    for name, p in fused.end.items():
        torch.testing.assert_close(p, usual.end[name], atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
    assert len(usual.logged) == STEPS + 1
    for before, after in zip(usual.logged, fused.logged, strict=True):
        for name, value in before.items():
            if not any(part in name for part in UNLIKE):
                assert after[name] == pytest.approx(value, abs=1e-5, rel=1e-5), name
    losses = [row["loss"] for row in usual.logged[:-1]]
    assert min(losses) > 1e-3 and len(set(losses)) == STEPS
    assert fused.micro_batches == usual.micro_batches
    return fused


def one_batch(trainer: Any) -> Any:
    """The first micro-batch, generated by the student where the trainer does that."""
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    return trainer._prepare_inputs(batch)


def loss_and_gradients(trainer: Any, batch: Any, **kwargs: Any) -> dict[str, Tensor]:
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, batch, **kwargs)
    loss.backward()
    gradients = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


def assert_same_step(trainer: Any, batch: Any, **kwargs: Any) -> None:
    usual = loss_and_gradients(trainer, batch, **kwargs)
    with use_fused_loss(trainer):
        fused = loss_and_gradients(trainer, batch, **kwargs)
    assert fused.keys() == usual.keys()
    assert usual["loss"] > 1e-4
    for name, expected in usual.items():
        torch.testing.assert_close(
            fused[name], expected, atol=2e-6, rtol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def scaled(kind: str) -> Any:
    """A model that does more to its logits than its head does."""
    sizes: dict[str, Any] = dict(
        vocab_size=tiny.VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=tiny.END,
        pad_token_id=tiny.END,
    )
    more = {
        "Gemma2": {"final_logit_softcapping": 3.0},
        "Cohere": {"logit_scale": 0.2},
        "Granite": {"logits_scaling": 4.0},
    }
    config = getattr(transformers, f"{kind}Config")(**sizes, **more[kind])
    torch.manual_seed(3)
    return getattr(transformers, f"{kind}ForCausalLM")(config)
