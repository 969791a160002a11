"""Which tasks a step takes, from the seed and the step alone."""

from collections import Counter
from collections.abc import Sequence

import torch

from lopd_fast.envs.base import Task


def spread_groups(tasks: Sequence[Task], seed: int) -> list[Task]:
    """The tasks in random order, each group's spread evenly over it.

    A step that holds more of one group than of another moves the student towards that group's answers, and the next
    step back: noise on what tells the groups apart.
    """
    generator = torch.Generator().manual_seed(seed)
    shuffled = [tasks[index] for index in torch.randperm(len(tasks), generator=generator).tolist()]
    sizes = Counter(task.group for task in tasks)
    seen: Counter[str] = Counter()
    places = []
    for task in shuffled:
        places.append((seen[task.group] + 0.5) / sizes[task.group])
        seen[task.group] += 1
    return [shuffled[index] for index in sorted(range(len(tasks)), key=lambda index: places[index])]


def tasks_of_step(tasks: Sequence[Task], step: int, count: int, seed: int) -> list[Task]:
    """The `count` tasks of a step (from 0): the list in a new order for every pass over it."""
    chosen = []
    for position in range(step * count, (step + 1) * count):
        epoch, offset = divmod(position, len(tasks))
        chosen.append(spread_groups(tasks, seed * 1_000_003 + epoch)[offset])
    return chosen
