"""Which experiences a task gets: the bank's nearest, or, as an ablation, random ones."""

import random
from collections.abc import Sequence

from lopd_fast.bank import Experience, ExperienceBank
from lopd_fast.config import RetrievalConfig
from lopd_fast.envs.base import Task


def retrieve(
    bank: ExperienceBank,
    tasks: Sequence[Task],
    config: RetrievalConfig,
    *,
    seed: int = 0,
    groups: Sequence[set[str]] | None = None,
) -> list[list[Experience]]:
    """J experiences for every task (fewer from a small bank).

    `groups` restricts task b to experiences of the labels `groups[b]`; without it, `config.within_group` restricts
    every task to its own group.
    """
    if groups is None and config.within_group:
        groups = [{task.group} for task in tasks]
    if config.shuffle:
        rng = random.Random(seed)
        named = groups or [None] * len(tasks)
        allowed = [_allowed(bank, *each, config) for each in zip(tasks, named, strict=True)]
        return [rng.sample(entries, min(config.neighbours, len(entries))) for entries in allowed]
    hits = bank.search(
        [task.text for task in tasks], config.neighbours, allow_self=config.allow_self, groups=groups
    )
    return [[hit.experience for hit in found] for found in hits]


def negatives(
    bank: ExperienceBank,
    tasks: Sequence[Task],
    positives: Sequence[Sequence[Experience]],
    *,
    seed: int,
    most: int,
) -> list[list[Experience]]:
    """For the first `most` tasks that have any, as many experiences of others as each has positives; else [].

    Others are of another group than the task's, at random; where there is none, any that is neither among the
    positives nor of this task. Nothing is embedded.
    """
    rng = random.Random(seed)
    found: list[list[Experience]] = []
    for task, shown in zip(tasks, positives, strict=True):
        if sum(map(bool, found)) == most:
            found.append([])
            continue
        near = {item.id for item in shown}
        free = [
            item
            for item in bank.experiences
            if item.id not in near and item.task.strip() != task.text.strip()
        ]
        others = [item for item in free if item.group != task.group] or free
        found.append(rng.sample(others, min(len(shown), len(others))))
    return found


def _allowed(
    bank: ExperienceBank, task: Task, groups: set[str] | None, config: RetrievalConfig
) -> list[Experience]:
    """What a search for `task` may return."""
    return [
        item
        for item in bank.experiences
        if (groups is None or item.group in groups)
        and (config.allow_self or item.task.strip() != task.text.strip())
    ]
