"""TRL's GKDTrainer with the fused loss: the same losses over the whole vocabulary, less memory.

python examples/trl_gkd.py
"""

from typing import Any

from datasets import Dataset
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl_side_by_side import SEQUENCES, common_settings, side_by_side, tiny_model, tiny_tokenizer


def make_trainer(steps: int, tokens: int, vocabulary: int) -> Any:
    """The Jensen-Shannon divergence (beta 0.5, the default) on answers of a data set."""
    args = GKDConfig(**common_settings(steps), lmbda=0.0, max_length=None)
    messages = [
        {"role": "user", "content": "What is 6 x 7?"},
        {"role": "assistant", "content": "4" * (tokens - 1)},  # and the end of the turn
    ]
    return GKDTrainer(
        model=tiny_model(vocabulary),
        teacher_model=tiny_model(vocabulary, seed=1),
        args=args,
        train_dataset=Dataset.from_list([{"messages": messages}] * (SEQUENCES * steps)),
        processing_class=tiny_tokenizer(),
    )


if __name__ == "__main__":
    side_by_side(make_trainer, "GKDTrainer", tokens=16)
