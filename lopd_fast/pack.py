"""Rollouts -> StepBatch: row n is the same sampled token on the student's and on the teacher's side.

The completion is kept whole on both sides. A rollout whose teacher prompt (longer by its latents) does not fit is
dropped on both sides and said so. Alignment is asserted here, once, for everything that follows.
"""

import logging
from collections.abc import Sequence

import torch

from lopd_fast.batch import Rollout, Side, StepBatch
from lopd_fast.errors import UserError
from lopd_fast.render import Renderer

logger = logging.getLogger(__name__)


def fitting(
    rollouts: Sequence[Rollout], latents: Sequence[int], renderer: Renderer, max_tokens: int
) -> list[int]:
    """Indices of the rollouts with a student token whose teacher-side sequence has at most `max_tokens` tokens."""
    kept = []
    for index, (rollout, count) in enumerate(zip(rollouts, latents, strict=True)):
        prompt, _ = renderer.prompt(rollout.messages, count)
        length = len(prompt) + len(rollout.response_ids)
        if length > max_tokens:
            logger.warning(
                "dropped a rollout of task %s: %d tokens with the teacher's prompt, over rollout.max_tokens=%d",
                rollout.task.id,
                length,
                max_tokens,
            )
        elif any(rollout.student_mask):
            kept.append(index)
    return kept


def pack_step(rollouts: Sequence[Rollout], latents: Sequence[int], renderer: Renderer) -> StepBatch:
    """Both views of `rollouts`, with `latents[b]` slots in the teacher's prompt of rollout b.

    Raises:
        UserError: a rollout's ids and mask differ in length.
    """
    for rollout in rollouts:
        if len(rollout.response_ids) != len(rollout.student_mask):
            raise UserError(
                f"The rollout of task {rollout.task.id} has {len(rollout.response_ids)} response ids "
                f"but a mask of {len(rollout.student_mask)}."
            )
    student = _side(rollouts, [0] * len(rollouts), renderer)
    teacher = _side(rollouts, latents, renderer)
    targets = [
        token
        for rollout in rollouts
        for token, mine in zip(rollout.response_ids, rollout.student_mask, strict=True)
        if mine
    ]
    advantages = [rollout.advantage for rollout in rollouts for mine in rollout.student_mask if mine]
    batch = StepBatch(
        list(rollouts),
        student,
        teacher,
        torch.tensor(targets, dtype=torch.int64),
        torch.tensor(advantages, dtype=torch.float32),
    )
    for side in (batch.student, batch.teacher):
        assert torch.equal(side.ids.flatten()[side.rows + 1], batch.targets)
    return batch


def _side(rollouts: Sequence[Rollout], latents: Sequence[int], renderer: Renderer) -> Side:
    prompts = [
        renderer.prompt(rollout.messages, count) for rollout, count in zip(rollouts, latents, strict=True)
    ]
    lengths = [
        len(ids) + len(rollout.response_ids) for (ids, _), rollout in zip(prompts, rollouts, strict=True)
    ]
    longest = max(lengths, default=0)
    ids = torch.full((len(rollouts), longest), renderer.pad_id, dtype=torch.int64)
    mask = torch.zeros(len(rollouts), longest, dtype=torch.bool)
    rows: list[int] = []
    slots: list[int] = []
    for row, (rollout, (prompt, offset)) in enumerate(zip(rollouts, prompts, strict=True)):
        sequence = prompt + rollout.response_ids
        ids[row, : len(sequence)] = torch.tensor(sequence, dtype=torch.int64)
        mask[row, : len(sequence)] = True
        before = row * longest + len(prompt) - 1  # the position that predicts the first response token
        rows += [before + position for position, mine in enumerate(rollout.student_mask) if mine]
        slots += range(row * longest + offset, row * longest + offset + latents[row])
    return Side(ids, mask, torch.tensor(rows, dtype=torch.int64), torch.tensor(slots, dtype=torch.int64))


def micro_batches(rollouts: Sequence[Rollout], budget: int, renderer: Renderer) -> list[list[Rollout]]:
    """Rollouts in groups of like length, each at most `budget` padded student-side tokens (or one rollout)."""
    lengths = {id(item): len(renderer.prompt(item.messages)[0]) + len(item.response_ids) for item in rollouts}
    groups: list[list[Rollout]] = []
    for rollout in sorted(rollouts, key=lambda item: lengths[id(item)]):
        if groups and (len(groups[-1]) + 1) * lengths[id(rollout)] <= budget:
            groups[-1].append(rollout)
        else:
            groups.append([rollout])
    return groups
