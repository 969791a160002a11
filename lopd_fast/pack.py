"""Rollouts -> StepBatch: row n is the same sampled token on the student's and on the teacher's side.

The completion is kept whole on both sides. A rollout whose teacher prompt (longer by its latents) does not fit is
dropped on both sides and said so. Alignment is asserted here, once, for everything that follows.
"""

import logging
from collections.abc import Sequence

import torch

from lopd_fast.batch import Rollout, Side, StepBatch
from lopd_fast.errors import UserError
from lopd_fast.prefix_tree import pack
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


def pack_step(
    rollouts: Sequence[Rollout], latents: Sequence[int], renderer: Renderer, share: bool = True
) -> StepBatch:
    """Both views of `rollouts`, with `latents[b]` slots in the teacher's prompt of rollout b.

    `share` says whether tokens that sequences have in common are held once (Backbone.shares_prefixes).

    Raises:
        UserError: a rollout's ids and mask differ in length.
    """
    for rollout in rollouts:
        if len(rollout.response_ids) != len(rollout.student_mask):
            raise UserError(
                f"The rollout of task {rollout.task.id} has {len(rollout.response_ids)} response ids "
                f"but a mask of {len(rollout.student_mask)}."
            )
    student = _side(rollouts, [0] * len(rollouts), renderer, share)
    teacher = _side(rollouts, latents, renderer, share)
    targets = [
        token
        for rollout in rollouts
        for token, mine in zip(rollout.response_ids, rollout.student_mask, strict=True)
        if mine
    ]
    advantages = [rollout.advantage for rollout in rollouts for mine in rollout.student_mask if mine]
    return StepBatch(
        list(rollouts),
        student,
        teacher,
        torch.tensor(targets, dtype=torch.int64),
        torch.tensor(advantages, dtype=torch.float32),
    )


def _side(rollouts: Sequence[Rollout], latents: Sequence[int], renderer: Renderer, share: bool) -> Side:
    prompts = [
        renderer.prompt(rollout.messages, count) for rollout, count in zip(rollouts, latents, strict=True)
    ]
    sequences = [ids + rollout.response_ids for (ids, _), rollout in zip(prompts, rollouts, strict=True)]
    slots = [range(offset, offset + count) for (_, offset), count in zip(prompts, latents, strict=True)]
    if not sequences:  # a process with no rollout of its own: one token that nobody asks about
        empty = torch.zeros(0, dtype=torch.int64)
        return Side(pack([[renderer.pad_id]])[0], empty, empty)
    packed, paths = pack(sequences, _keys(sequences, slots), share)
    rows, places = [], []
    for path, (prompt, _), slot, rollout in zip(paths, prompts, slots, rollouts, strict=True):
        mask = torch.tensor(rollout.student_mask, dtype=torch.bool)
        supervised = mask.nonzero()[:, 0] + len(prompt)
        assert torch.equal(packed.ids[path[supervised]], torch.tensor(rollout.response_ids)[mask])
        rows.append(path[supervised - 1])  # the place that predicts the token
        places.append(path[slot.start : slot.stop])
    return Side(packed, torch.cat(rows), torch.cat(places))


def _keys(sequences: Sequence[list[int]], slots: Sequence[range]) -> list[list[int]]:
    """The ids, and a number of its own for every latent slot: latents of two rollouts are never taken for the same."""
    keys = []
    own = -1
    for sequence, slot in zip(sequences, slots, strict=True):
        keys.append(sequence[: slot.start] + list(range(own, own - len(slot), -1)) + sequence[slot.stop :])
        own -= len(slot)
    return keys


def micro_batches(rollouts: Sequence[Rollout], budget: int, renderer: Renderer) -> list[list[Rollout]]:
    """Rollouts, in order, in groups of at most `budget` student-side tokens (or one rollout).

    Every rollout counts in full: the teacher's sides of two rollouts share nothing behind their latents.
    """
    groups: list[list[Rollout]] = []
    left = 0
    for rollout in rollouts:
        length = len(renderer.prompt(rollout.messages)[0]) + len(rollout.response_ids)
        if groups and length <= left:
            groups[-1].append(rollout)
            left -= length
        else:
            groups.append([rollout])
            left = budget - length
    return groups
