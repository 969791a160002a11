"""TRL's SDPOTrainer with the fused loss: the same losses, less memory.

python examples/trl_sdpo.py
"""

from typing import Any

from datasets import Dataset
from trl.experimental.sdpo import SDPOConfig, SDPOTrainer
from trl_side_by_side import SEQUENCES, common_settings, side_by_side, tiny_model, tiny_tokenizer


def first_of_two(completions: list[Any], **_: Any) -> list[float]:
    """Let the first of two attempts succeed: the teacher of the second sees it."""
    return [float(i % 2 == 0) for i in range(len(completions))]


def make_trainer(steps: int, tokens: int, vocabulary: int) -> Any:
    """A self-distillation on the student's top-20 and a tail bucket, from attempts that succeeded."""
    args = SDPOConfig(
        **common_settings(steps),
        distillation_mode="topk_logits",
        distillation_topk=20,
        distillation_add_tail=True,
        teacher_model_kind="live",
        num_generations=2,
        dont_reprompt_on_self_success=False,
        max_completion_length=tokens,
        generation_kwargs={"min_new_tokens": tokens},
    )
    example = {"prompt": [{"role": "user", "content": "What is 6 x 7?"}]}
    return SDPOTrainer(
        model=tiny_model(vocabulary),
        reward_funcs=[first_of_two],
        args=args,
        train_dataset=Dataset.from_list([example] * (SEQUENCES * steps)),
        processing_class=tiny_tokenizer(),
    )


if __name__ == "__main__":
    side_by_side(make_trainer, "SDPOTrainer")
