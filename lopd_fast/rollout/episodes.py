"""What every rollout engine shares: episodes played turn by turn, whoever samples the tokens.

An engine says who acts (`policy`: the student as it is now; `base`: the frozen backbone) and samples one action for
each of some episodes. Ids go end to end as they were sampled.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lopd_fast.backbone import Backbone
from lopd_fast.batch import Rollout
from lopd_fast.config import RolloutConfig
from lopd_fast.envs.base import Environment, Episode, Task, check_result
from lopd_fast.render import Renderer
from lopd_fast.rollout.sampling import Sampling
from lopd_fast.student import Student

Progress = Callable[[int], None]  # hears how many episodes have just ended
Policy = Any  # what an engine's own `policy` or `base` gave


@dataclass(eq=False)
class Running:
    """An episode under way; equal to itself alone."""

    episode: Episode
    rollout: Rollout
    prompt_ids: list[int]
    slot: int  # offset of the latents in the prompt
    latents: Tensor | None  # (L, H)
    seed: int  # of the whole call
    turns: int = 0
    order: int = 0
    own_seed: int | None = None  # of its own draws, whatever is sampled beside it

    @property
    def ids(self) -> list[int]:
        """Everything so far, which the next action follows."""
        return self.prompt_ids + self.rollout.response_ids


class Episodes(ABC):
    """Plays episodes; a subclass samples."""

    def __init__(self, renderer: Renderer, config: RolloutConfig) -> None:
        self.renderer = renderer
        self.config = config
        self._end_ids = renderer.end_ids

    @abstractmethod
    def policy(self, student: Student) -> AbstractContextManager[Policy]:
        """The student at its present weights, to be handed to `rollouts`."""

    @abstractmethod
    def base(self, backbone: Backbone) -> AbstractContextManager[Policy]:
        """The backbone without any adapter, to be handed to `rollouts`."""

    @abstractmethod
    def _generate(
        self, model: Policy, batch: Sequence[Running], sampling: Sampling, budget: int
    ) -> list[list[int]]:
        """New ids of every episode, at most `budget`; what follows an end id or goes beyond `room` is cut off."""

    def rollouts(
        self,
        model: Policy,
        environment: Environment,
        tasks: Sequence[Task],
        sampling: Sampling,
        *,
        seed: int,
        latents: Sequence[Tensor] | None = None,
        progress: Progress | None = None,
        seeds: Sequence[int] | None = None,
    ) -> list[Rollout]:
        """One episode of every task, in the order of `tasks`; `latents[b]` (L_b, H) condition episode b.

        Sampling draws from `seed` alone and leaves the global generator as it was. With `seeds`, episode b draws from
        `seeds[b]` instead, whatever else is sampled beside it.
        """
        running = []
        for order, task in enumerate(tasks):
            episode = environment.start(task)
            given = latents[order] if latents is not None and latents[order].shape[0] else None
            prompt, slot = self.renderer.prompt(episode.messages, 0 if given is None else given.shape[0])
            rollout = Rollout(task, [dict(message) for message in episode.messages], [], [], 0.0)
            own = None if seeds is None else seeds[order]
            running.append(Running(episode, rollout, prompt, slot, given, seed, order=order, own_seed=own))
        finished: list[Running] = []
        with self._sampling(model, seed):
            while running:
                running.sort(key=lambda item: (len(item.ids), item.order))
                batch, running = running[: self._at_once], running[self._at_once :]
                self._turn(model, batch, sampling)
                going_on = [item for item in batch if not self._ended(item, environment.max_turns)]
                done = [item for item in batch if item not in going_on]
                finished += done
                running += going_on
                if progress is not None and done:
                    progress(len(done))
        return [item.rollout for item in sorted(finished, key=lambda item: item.order)]

    @property
    def _at_once(self) -> int:
        """Episodes that are handed to `_generate` together."""
        return self.config.batch_size

    @contextmanager
    def _sampling(self, model: Policy, seed: int) -> Iterator[None]:
        """What holds while episodes are played."""
        yield

    def _room(self, item: Running) -> int:
        """Tokens that the next action of an episode may have."""
        return max(1, min(self.config.max_new_tokens, self.config.max_tokens - len(item.ids)))

    def _turn(self, model: Policy, batch: Sequence[Running], sampling: Sampling) -> None:
        """Sample one action for every episode of the batch and hand it to its environment."""
        rooms = [self._room(item) for item in batch]
        answers = self._generate(model, batch, sampling, max(rooms))
        for item, room, answer in zip(batch, rooms, answers, strict=True):
            sampled = answer[:room]  # its own room: a neighbour's long prompt cuts nobody short
            ended = next((i for i, token in enumerate(sampled) if token in self._end_ids), None)
            action_ids = sampled if ended is None else sampled[: ended + 1]
            text_ids = sampled if ended is None else sampled[:ended]
            action = self.renderer.tokenizer.decode(text_ids, skip_special_tokens=True)
            assert isinstance(action, str)
            result = item.episode.step(action)
            check_result(result, item.rollout.task)
            rollout = item.rollout
            rollout.response_ids += action_ids
            rollout.student_mask += [True] * len(action_ids)
            rollout.steps.append({"action": action, "observation": result.observation})
            rollout.truncated = ended is None
            item.turns += 1
            if result.done:
                rollout.reward = float(result.reward)
                item.turns = -1

    def _ended(self, item: Running, max_turns: int) -> bool:
        """Whether the episode is over; if not, its observation becomes the next user turn."""
        if item.turns == -1 or item.turns >= max_turns or item.rollout.truncated:
            return True
        observation = self.renderer.observation(item.rollout.steps[-1]["observation"])
        if len(item.ids) + len(observation) + 1 > self.config.max_tokens:
            item.rollout.truncated = True
            return True
        item.rollout.response_ids += observation
        item.rollout.student_mask += [False] * len(observation)
        return False
