"""How much a step holds at once at most, from its configuration and, where they are at hand, tasks and tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lopd_fast.backbone import load_tokenizer
from lopd_fast.build import build_environment
from lopd_fast.config import Config
from lopd_fast.errors import UserError
from lopd_fast.render import Renderer


@dataclass(frozen=True)
class Load:
    """The most that a step holds at once."""

    tokens: int  # of the longest rollout as the teacher reads it: prompt, latents and all turns
    response: int  # of these, tokens that follow the first prompt
    rollouts: int  # in a micro-batch
    micro_batches: int  # in a step
    sampled: int  # rollouts sampled at a time
    batches: int  # of sampled rollouts in a step
    turn: int  # tokens of one sampled turn
    experiences: int  # of each rollout
    latents: int  # of each rollout
    memory: int  # tokens of each experience


def load_of(config: Config) -> Load:
    """The load of a run in which every rollout is as long as it may get.

    That is rollout.max_tokens, except for a single-turn environment whose tasks and tokenizer are there: then it is the
    longest prompt with one turn. An experience is a rollout, so without a bank of its own a run has none longer.

    Raises:
        UserError: the environment is not known, or rollout.max_tokens leaves no room for a response.
    """
    rollout, composer = config.rollout, config.composer
    latents = config.retrieval.neighbours * composer.num_queries if config.objective.use_latents else 0
    measured = _single_turn(config, latents)
    prompt, response = measured or (latents + 1, rollout.max_tokens)
    tokens = min(rollout.max_tokens, prompt + response)
    response = tokens - prompt
    if response < 1:
        raise UserError(
            f"rollout.max_tokens={rollout.max_tokens} leaves no room for a response after {prompt} tokens of prompt "
            f"and latents; raise it, or lower retrieval.neighbours or composer.num_queries."
        )
    total = config.train.tasks_per_step * config.train.rollouts_per_task
    rollouts = min(total, max(1, config.train.micro_batch_tokens // (tokens - latents)))
    sampled = min(rollout.batch_size, total)
    return Load(
        tokens=tokens,
        response=response,
        rollouts=rollouts,
        micro_batches=-(-total // rollouts),
        sampled=sampled,
        batches=-(-total // sampled),
        turn=min(rollout.max_new_tokens, response),
        experiences=config.retrieval.neighbours,
        latents=latents,
        memory=composer.max_memory_tokens
        if config.retrieval.bank
        else min(composer.max_memory_tokens, tokens),
    )


def _single_turn(config: Config, latents: int) -> tuple[int, int] | None:
    """Tokens of the longest teacher's prompt and of one action; None where they cannot be told ahead."""
    if not config.environment.name:
        return None
    environment = build_environment(config.environment)
    if environment.max_turns > 1 or not Path(config.model.path, "config.json").is_file():
        return None
    renderer = Renderer(load_tokenizer(config.model), config.model.template_options)
    tasks = environment.tasks("train", config.environment.train_tasks, config.train.seed)
    tasks += environment.tasks("heldout", config.environment.heldout_tasks, config.train.seed)
    prompts = [renderer.prompt(environment.start(task).messages, latents)[0] for task in tasks]
    return max(map(len, prompts)), config.rollout.max_new_tokens
