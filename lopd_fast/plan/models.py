"""Shapes to plan for: a model folder's config.json, or one of a few by name where there is no folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, LlamaConfig, Olmo3Config, PretrainedConfig, Qwen3Config

from lopd_fast.config import ModelConfig
from lopd_fast.errors import UserError

_QWEN3: dict[str, Any] = dict(
    vocab_size=151_936,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40_960,
)
_SHAPES: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "qwen3-8b": (Qwen3Config, _QWEN3 | dict(hidden_size=4096, intermediate_size=12_288)),
    "qwen3-4b": (
        Qwen3Config,
        _QWEN3 | dict(hidden_size=2560, intermediate_size=9728, tie_word_embeddings=True),
    ),
    "olmo3-7b": (
        Olmo3Config,
        dict(
            vocab_size=100_278,
            hidden_size=4096,
            intermediate_size=11_008,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=32,
            max_position_embeddings=65_536,
            sliding_window=4096,  # in three blocks of four
        ),
    ),
    "smollm2": (
        LlamaConfig,
        dict(
            vocab_size=49_152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
        ),
    ),
}
NAMES = tuple(_SHAPES)


def named_model(name: str) -> PretrainedConfig:
    """The configuration of a model known by name.

    Raises:
        UserError: the name is not known.
    """
    if name not in _SHAPES:
        raise UserError(f"There is no model shape '{name}'; the known ones are {', '.join(NAMES)}.")
    kind, sizes = _SHAPES[name]
    return kind(**sizes)


def model_of(config: ModelConfig) -> PretrainedConfig:
    """The configuration in the folder `model.path`; no weights are read.

    Raises:
        UserError: no folder is named, or it holds no configuration that transformers knows.
    """
    if not config.path or not Path(config.path, "config.json").is_file():
        where = f"There is no model at {config.path}" if config.path else "No model is named"
        raise UserError(f"{where}; set model.path to the folder of a causal language model.")
    try:
        return AutoConfig.from_pretrained(
            config.path, trust_remote_code=config.trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{config.path}/config.json cannot be read: {str(error).splitlines()[0]}") from None
