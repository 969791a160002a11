"""TRL's DistillationTrainer with the fused loss: the same losses over the whole vocabulary, less memory.

python examples/trl_distillation.py
"""

from typing import Any

from datasets import Dataset
from trl import DistillationConfig, DistillationTrainer  # pyright: ignore[reportPrivateImportUsage]
from trl_side_by_side import SEQUENCES, common_settings, side_by_side, tiny_model, tiny_tokenizer


def make_trainer(steps: int, tokens: int, vocabulary: int) -> Any:
    """An on-policy distillation from another random model, by the reverse KL (beta 1, the default)."""
    args = DistillationConfig(
        **common_settings(steps), max_completion_length=tokens, generation_kwargs={"min_new_tokens": tokens}
    )
    example = {"prompt": [{"role": "user", "content": "What is 6 x 7?"}]}
    return DistillationTrainer(
        model=tiny_model(vocabulary),
        teacher_model=tiny_model(vocabulary, seed=1),
        args=args,
        train_dataset=Dataset.from_list([example] * (SEQUENCES * steps)),
        processing_class=tiny_tokenizer(),
    )


if __name__ == "__main__":
    side_by_side(make_trainer, "DistillationTrainer")
