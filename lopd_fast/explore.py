"""Growing the bank from the model's own successes: best of n, with earlier successes shown as chat turns.

The frozen base rarely solves a task unaided. Shown what worked before on the most similar tasks, as text, it does
more often; what it then gets right is kept with the plain prompt, as if it had been solved without the examples.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lopd_fast.bank import Experience, ExperienceBank, linearise
from lopd_fast.batch import Rollout
from lopd_fast.config import RetrievalConfig
from lopd_fast.envs.base import Environment, Episode, Message, StepResult, Task
from lopd_fast.retrieval import retrieve
from lopd_fast.rollout.episodes import Episodes, Policy, Progress
from lopd_fast.rollout.sampling import Sampling


def experience_of(rollout: Rollout, source: str = "rollout") -> Experience:
    """A finished rollout as the bank keeps it."""
    trace = linearise(rollout.steps)
    return Experience("", rollout.task.text, trace, rollout.reward, group=rollout.task.group, source=source)


def successful(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The rollouts with full reward whose every action says something."""
    return [
        rollout
        for rollout in rollouts
        if rollout.reward >= 1.0 and rollout.steps and all(step["action"].strip() for step in rollout.steps)
    ]


@dataclass
class _Shown:
    """An environment whose episodes begin with examples; everything else is the wrapped one's."""

    inner: Environment
    examples: dict[str, list[Message]]  # by task id

    def __post_init__(self) -> None:
        self.name = self.inner.name
        self.max_turns = self.inner.max_turns

    def tasks(self, split: str, count: int, seed: int) -> list[Task]:
        return self.inner.tasks(split, count, seed)

    def start(self, task: Task) -> "Episode":
        return _ShownEpisode(self.inner.start(task), self.examples.get(task.id, []))


class _ShownEpisode:
    def __init__(self, inner: Episode, examples: Sequence[Message]) -> None:
        self.inner = inner
        system = [message for message in inner.messages if message["role"] == "system"]
        rest = [message for message in inner.messages if message["role"] != "system"]
        self.messages: Sequence[Message] = [*system, *examples, *rest]

    def step(self, action: str) -> StepResult:
        return self.inner.step(action)


def explore(
    model: Policy,
    engine: Episodes,
    environment: Environment,
    tasks: Sequence[Task],
    bank: ExperienceBank,
    pool: dict[str, Rollout],
    *,
    retrieval: RetrievalConfig,
    shots: int,
    sampling: Sampling,
    seed: int,
    per_group: int | None = None,
    progress: Progress | None = None,
) -> list[Rollout]:
    """Attempt every task once, with up to `shots` successes on similar tasks shown; return the rollouts kept.

    `pool` maps an experience's id to its rollout. Both `bank` and `pool` grow by what succeeds, until the pool holds
    `per_group` of a task's group.
    """
    have = Counter(rollout.task.group for rollout in pool.values())
    tasks = [task for task in tasks if per_group is None or have[task.group] < per_group]
    if not tasks:
        return []
    examples: dict[str, list[Message]] = {}
    if len(bank) and shots:
        found = retrieve(bank, tasks, replace(retrieval, neighbours=shots, shuffle=False))
        for task, experiences in zip(tasks, found, strict=True):
            shown = [pool[item.id] for item in reversed(experiences) if item.id in pool]
            examples[task.id] = [turn for rollout in shown for turn in _turns(rollout)]
    rollouts = engine.rollouts(
        model, _Shown(environment, examples), tasks, sampling, seed=seed, progress=progress
    )
    good = []
    for rollout in successful(rollouts):
        if per_group is None or have[rollout.task.group] < per_group:
            have[rollout.task.group] += 1
            rollout.messages = [dict(message) for message in environment.start(rollout.task).messages]
            good.append(rollout)
    keep(good, bank, pool)
    return good


def keep(
    rollouts: Sequence[Rollout], bank: ExperienceBank, pool: dict[str, Rollout], source: str = "rollout"
) -> None:
    """Add successful rollouts to the bank, and to the pool under their experiences' ids."""
    experiences = [experience_of(rollout, source) for rollout in rollouts]
    bank.add(experiences)
    for experience, rollout in zip(experiences, rollouts, strict=True):
        pool.setdefault(experience.id, rollout)


def _turns(rollout: Rollout) -> list[Message]:
    """A rollout as the chat turns it was."""
    turns = [message for message in rollout.messages if message["role"] != "system"]
    for number, step in enumerate(rollout.steps):
        turns.append({"role": "assistant", "content": step["action"]})
        if number + 1 < len(rollout.steps):
            turns.append({"role": "user", "content": step["observation"]})
    return turns


def replay(environment: Environment, task: Task, action: str, ids: list[int]) -> Rollout:
    """The rollout of a given action with its ids, end token included: a seed demonstration of a single-turn task."""
    episode = environment.start(task)
    messages = [dict(message) for message in episode.messages]
    result = episode.step(action)
    steps = [{"action": action, "observation": result.observation}]
    return Rollout(task, messages, ids, [True] * len(ids), result.reward, steps)
