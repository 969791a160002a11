"""What the TRL examples share: a tiny model with a large vocabulary, and a run with and without the fused loss."""

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
from peak_memory import peak_here, peak_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback

from lopd_fast.integrations.trl import use_fused_loss

VOCABULARY = 151_936  # as wide as Qwen's
SEQUENCES = 8


Make = Callable[[int, int, int], Any]  # steps, tokens a sequence, vocabulary -> a trainer


def tiny_model(vocabulary: int, seed: int = 0) -> LlamaForCausalLM:
    """A random Llama of two layers and width 64: next to nothing but its head."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.2,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        )
    )


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes as tokens: far fewer than the model has ids, but its head scores them all."""
    tokens = ["<bos>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bpe = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    bpe.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<eos>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, **special)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return tokenizer


def common_settings(steps: int) -> dict[str, Any]:
    """Arguments that every trainer's config takes."""
    return dict(
        output_dir="runs/trl-example",
        max_steps=steps,
        per_device_train_batch_size=SEQUENCES,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )


def losses_of(make_trainer: Make, steps: int, tokens: int, vocabulary: int, fused: bool) -> list[float]:
    """Train one variant."""
    trainer = make_trainer(steps, tokens, vocabulary)
    trainer.remove_callback(PrinterCallback)
    if fused:
        use_fused_loss(trainer)  # the line to add
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def side_by_side(make_trainer: Make, name: str, tokens: int = 32) -> None:
    """Train with TRL's loss in another process and with the fused one in this, so that each has a peak of its own."""
    parser = argparse.ArgumentParser(description=f"{name} with TRL's loss and with the fused one")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=tokens, help=f"of each of {SEQUENCES} completions")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    args = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "PYTHONWARNINGS": "ignore"}
    print(f"{name}: {args.steps} steps of {SEQUENCES * args.tokens} tokens, vocabulary {args.vocabulary}")
    peaks = []
    for variant, measured in (("usual", peak_of), ("fused", peak_here)):
        losses, peak = measured(
            losses_of, make_trainer, args.steps, args.tokens, args.vocabulary, variant == "fused"
        )
        peaks.append(peak)
        print(
            f"{variant}: losses {'  '.join(f'{loss:.4f}' for loss in losses)}   peak memory {peak:,.0f} MiB"
        )
    print(f"memory ratio {peaks[0] / peaks[1]:.1f}")
