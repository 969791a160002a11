"""A step that has too little memory: one sentence on where it ended, at which sizes, and what to lower."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from lopd_fast.backbone import Backbone
from lopd_fast.batch import Rollout
from lopd_fast.errors import UserError
from lopd_fast.out_of_memory import is_out_of_memory


@contextmanager
def memory_told(advice: Callable[[], UserError]) -> Iterator[None]:
    """Where memory runs out inside, raises what `advice` gives."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise advice() from error


def learning_advice(
    where: str, group: Sequence[Rollout], backbone: Backbone, micro_batch_tokens: int
) -> UserError:
    """For the forward and backward of one micro-batch."""
    rows = sum(sum(rollout.student_mask) for rollout in group)
    now = []
    if len(group) > 1:
        now.append(f"lower train.micro_batch_tokens (now {micro_batch_tokens:,})")
    if not backbone.gradient_checkpointing:
        now.append("set model.gradient_checkpointing=true")
    elif backbone.device.type == "cuda" and not backbone.activation_offload:
        now.append("set model.activation_offload=true")
    sizes = f"a micro-batch of {len(group)} rollout{'s' * (len(group) != 1)}, {rows:,} rows"
    return advice(f"{where} ({sizes}, vocabulary {_vocabulary(backbone):,})", now, "lower rollout.max_tokens")


def sampling_advice(where: str, backbone: Backbone, batch_size: int) -> UserError:
    """For rollouts."""
    now = [f"lower rollout.batch_size (now {batch_size})"] if batch_size > 1 else []
    sizes = f"up to {batch_size} rows at once, vocabulary {_vocabulary(backbone):,}"
    return advice(f"{where} ({sizes})", now, "lower rollout.max_tokens")


def advice(where: str, now: Sequence[str], anew: str = "") -> UserError:
    """now: what a run that goes on may change; anew: what only a new run may, said where `now` is empty."""
    what = f"{', or '.join(now)}, then" if now else f"{anew} in a new run, or on a larger device"
    return UserError(f"Out of memory in {where}: {what} go on with --resume; what was saved is whole.")


def _vocabulary(backbone: Backbone) -> int:
    return backbone.head.weight.shape[0]
