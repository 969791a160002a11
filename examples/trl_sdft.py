"""TRL's SDFTTrainer with the fused loss: the same losses, less memory.

python examples/trl_sdft.py
"""

from typing import Any

from datasets import Dataset
from trl.experimental.sdft import SDFTConfig, SDFTTrainer
from trl_side_by_side import SEQUENCES, common_settings, side_by_side, tiny_model, tiny_tokenizer


def make_trainer(steps: int, tokens: int, vocabulary: int) -> Any:
    """A self-distillation on the student's top-100: the teacher is the student with the answer in its prompt."""
    example = {
        "prompt": [{"role": "user", "content": "What is 6 x 7?"}],
        "privileged_context": "The answer is 42.",
    }
    args = SDFTConfig(
        **common_settings(steps),
        teacher_model_kind="live",
        num_generations=1,
        max_completion_length=tokens,
        generation_kwargs={"min_new_tokens": tokens},
    )
    return SDFTTrainer(
        model=tiny_model(vocabulary),
        args=args,
        train_dataset=Dataset.from_list([example] * (SEQUENCES * steps)),
        processing_class=tiny_tokenizer(),
    )


if __name__ == "__main__":
    side_by_side(make_trainer, "SDFTTrainer")
