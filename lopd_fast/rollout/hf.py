"""The default rollout engine: transformers' generate, batched over episodes, one turn at a time.

Ids go end to end as they were sampled. A teacher is rolled out by the same code: its latents are spliced into the
embeddings of its prompt.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from lopd_fast.batch import Rollout
from lopd_fast.config import RolloutConfig
from lopd_fast.envs.base import Environment, Episode, Task, check_result
from lopd_fast.render import Renderer
from lopd_fast.rollout.sampling import NucleusOfTopK, Sampling
from lopd_fast.teacher import splice

Progress = Callable[[int], None]  # hears how many episodes have just ended


@dataclass(eq=False)
class _Running:
    """An episode under way; equal to itself alone."""

    episode: Episode
    rollout: Rollout
    prompt_ids: list[int]
    slot: int  # offset of the latents in the prompt
    latents: Tensor | None  # (L, H)
    turns: int = 0
    order: int = 0

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.rollout.response_ids


class HFRollout:
    """Rolls episodes out with a transformers model."""

    def __init__(self, renderer: Renderer, config: RolloutConfig) -> None:
        self.renderer = renderer
        self.config = config
        self._end_ids = renderer.end_ids

    @torch.no_grad()
    def rollouts(
        self,
        model: PreTrainedModel,
        environment: Environment,
        tasks: Sequence[Task],
        sampling: Sampling,
        *,
        seed: int,
        latents: Sequence[Tensor] | None = None,
        progress: Progress | None = None,
    ) -> list[Rollout]:
        """One episode of every task, in the order of `tasks`; `latents[b]` (L_b, H) condition episode b.

        Sampling draws from `seed` alone and leaves the global generator as it was.
        """
        running = []
        for order, task in enumerate(tasks):
            episode = environment.start(task)
            given = latents[order] if latents is not None and latents[order].shape[0] else None
            prompt, slot = self.renderer.prompt(episode.messages, 0 if given is None else given.shape[0])
            rollout = Rollout(task, [dict(message) for message in episode.messages], [], [], 0.0)
            running.append(_Running(episode, rollout, prompt, slot, given, order=order))
        finished: list[_Running] = []
        devices = [model.device] if model.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), _inference(model):
            torch.manual_seed(seed)
            while running:
                running.sort(key=lambda item: (len(item.ids), item.order))
                batch, running = running[: self.config.batch_size], running[self.config.batch_size :]
                self._turn(model, batch, sampling)
                going_on = [item for item in batch if not self._ended(item, environment.max_turns)]
                done = [item for item in batch if item not in going_on]
                finished += done
                running += going_on
                if progress is not None and done:
                    progress(len(done))
        return [item.rollout for item in sorted(finished, key=lambda item: item.order)]

    def _turn(self, model: PreTrainedModel, batch: Sequence[_Running], sampling: Sampling) -> None:
        """Sample one action for every episode of the batch and hand it to its environment."""
        longest = self.config.max_new_tokens
        rooms = [max(1, min(longest, self.config.max_tokens - len(item.ids))) for item in batch]
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

    def _ended(self, item: _Running, max_turns: int) -> bool:
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

    def _generate(
        self, model: PreTrainedModel, batch: Sequence[_Running], sampling: Sampling, budget: int
    ) -> list[list[int]]:
        """New token ids of every episode, through left-padded ids, or embeddings where latents are spliced in."""
        longest = max(len(item.ids) for item in batch)
        ids = torch.full((len(batch), longest), self.renderer.pad_id, dtype=torch.int64)
        mask = torch.zeros(len(batch), longest, dtype=torch.int64)
        slots: list[int] = []
        for row, item in enumerate(batch):
            padding = longest - len(item.ids)
            ids[row, padding:] = torch.tensor(item.ids)
            mask[row, padding:] = 1
            if item.latents is not None:
                first = row * longest + padding + item.slot
                slots += range(first, first + item.latents.shape[0])
        ids, mask = ids.to(model.device), mask.to(model.device)
        settings = GenerationConfig(
            do_sample=sampling.temperature > 0,
            max_new_tokens=budget,
            pad_token_id=self.renderer.pad_id,
            eos_token_id=sorted(self._end_ids),
            top_k=None,  # sampling is shaped by our own processor alone
            top_p=None,
            temperature=None,
        )
        processors = LogitsProcessorList([NucleusOfTopK(sampling)] if sampling.temperature > 0 else [])
        if slots:
            latents = torch.cat([item.latents for item in batch if item.latents is not None])
            embeddings = splice(
                model.get_input_embeddings()(ids), torch.tensor(slots, device=ids.device), latents
            )
            output = model.generate(  # pyright: ignore[reportCallIssue]
                inputs_embeds=embeddings,
                attention_mask=mask,
                generation_config=settings,
                logits_processor=processors,
            )
            return output.tolist()  # with embeddings, generate returns the new tokens alone
        output = model.generate(  # pyright: ignore[reportCallIssue]
            input_ids=ids, attention_mask=mask, generation_config=settings, logits_processor=processors
        )
        return output[:, longest:].tolist()


@contextmanager
def _inference(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode for every module, and each module's own mode back afterwards, come what may."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
