"""Builds the parts of a run from its configuration; what can be refused is refused here, before work starts."""

import difflib
import importlib
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lopd_fast.backbone import Backbone, embedding_table, load_model, load_tokenizer
from lopd_fast.bank import ExperienceBank
from lopd_fast.composer import Composer
from lopd_fast.config import Config, EnvironmentConfig, RetrievalConfig
from lopd_fast.envs.base import Environment
from lopd_fast.errors import UserError
from lopd_fast.lockstep import Lockstep
from lopd_fast.optimizers import check_installed
from lopd_fast.processes import World
from lopd_fast.render import Renderer
from lopd_fast.retriever import SentenceEncoder
from lopd_fast.rollout.episodes import Episodes
from lopd_fast.rollout.hf import HFRollout
from lopd_fast.rollout.shared import SharedRollout
from lopd_fast.rollout.vllm import VLLMRollout, check_vllm
from lopd_fast.student import Student
from lopd_fast.trackers import check_trackers

ENVIRONMENTS = ("staff_database", "lookup", "reasoning_gym")


@dataclass
class Parts:
    """What a run is made of."""

    config: Config
    backbone: Backbone
    renderer: Renderer
    student: Student
    composer: Composer
    bank: ExperienceBank
    engine: Episodes
    environment: Environment
    world: World = field(default_factory=World)  # the processes that the run is split over
    lockstep: Lockstep = field(default_factory=Lockstep)  # of those whose models are sharded

    def shard(self) -> None:
        """Leave each process its part of what is to be sharded."""
        if self.world.size == 1:
            return
        lockstep = Lockstep(self.world)
        if self.config.model.shard:
            self.backbone.shard(lockstep)
            self.lockstep = lockstep
        if self.student.mode == "full":
            if self.config.optim.kind != "adamw":
                raise UserError(
                    f"optim.kind={self.config.optim.kind} cannot step a student of which each process has a part "
                    "(student.mode=full in several processes); take optim.kind=adamw."
                )
            self.student.shard(lockstep)
            self.lockstep = lockstep


def build(config: Config, world: World | None = None) -> Parts:
    """Load the model once and put every part on it; the run's seed decides all initial weights.

    Raises:
        UserError: what is missing or does not fit, in one sentence.
    """
    check_trackers(config.train.trackers)
    for optim in (config.optim, config.cold_start.optim):
        check_installed(optim)
    if config.rollout.engine == "vllm":
        if world is not None and world.launched:
            raise UserError("rollout.engine=vllm samples in one process; of several, take rollout.engine=hf.")
        check_vllm(config)
    environment = build_environment(config.environment)
    tokenizer = load_tokenizer(config.model)
    renderer = Renderer(tokenizer, config.model.template_options)
    bank = build_bank(config.retrieval, config.model.trust_remote_code)
    model = load_model(config.model)
    known, embedded = len(tokenizer), embedding_table(model).shape[0]  # pyright: ignore[reportArgumentType]
    if known > embedded:
        raise UserError(
            f"The tokenizer knows {known} tokens but the model at {config.model.path} has embeddings for {embedded}; "
            "they are not a pair."
        )
    torch.manual_seed(config.train.seed)
    backbone = Backbone(model, config.model.gradient_checkpointing, config.model.activation_offload)
    student = Student(backbone, config.student, config.rollout.merge_lora)
    try:
        composer = Composer(backbone, tokenizer, config.composer)
    except ValueError as error:
        raise UserError(f"The composer cannot be built: {error}") from None
    world = world or World()
    engine = HFRollout(renderer, config.rollout)
    if world.launched:
        engine = SharedRollout(renderer, config.rollout, world)
    elif config.rollout.engine == "vllm":
        engine = VLLMRollout(renderer, config, backbone)
    parts = Parts(config, backbone, renderer, student, composer, bank, engine, environment, world)
    parts.shard()
    return parts


def build_bank(config: RetrievalConfig, trust_remote_code: bool = False) -> ExperienceBank:
    """The bank that the configuration names, or an empty one for the run's own successes.

    A bank's own encoder and prompts hold where the configuration names none.
    """
    if config.bank and not (config.query_prompt or config.document_prompt):
        return ExperienceBank.load(
            Path(config.bank).expanduser(), config.encoder, trust_remote_code=trust_remote_code
        )
    encoder = SentenceEncoder(
        *([config.encoder] if config.encoder else []),
        query_prompt=config.query_prompt or None,
        document_prompt=config.document_prompt or None,
        trust_remote_code=trust_remote_code,
    )
    return (
        ExperienceBank.load(Path(config.bank).expanduser(), encoder)
        if config.bank
        else ExperienceBank(encoder)
    )


def build_environment(config: EnvironmentConfig) -> Environment:
    """The environment by its name, or by `module:Class`, with its options."""
    if ":" in config.name:
        return _own_environment(config)
    if config.name not in ENVIRONMENTS:
        near = difflib.get_close_matches(config.name, ENVIRONMENTS, n=1)
        hint = (
            f"did you mean '{near[0]}'?"
            if near
            else f"the environments are {', '.join(ENVIRONMENTS)}, and module:Class."
        )
        raise UserError(f"There is no environment '{config.name}'; {hint}")
    try:
        if config.name == "staff_database":
            from lopd_fast.envs.staff_database import StaffDatabase

            return StaffDatabase(**config.options)
        if config.name == "lookup":
            from lopd_fast.envs.lookup import LookupEnvironment

            return LookupEnvironment(**config.options)
        from lopd_fast.envs.reasoning_gym import ReasoningGymEnvironment

        return ReasoningGymEnvironment(**config.options)
    except TypeError as error:
        raise UserError(f"environment.options do not fit {config.name}: {error}.") from None


def _own_environment(config: EnvironmentConfig) -> Environment:
    """An environment of the user's: a class, or any callable, in a module that Python finds from here."""
    module, _, name = config.name.partition(":")
    sys.path.insert(0, "")
    try:
        make = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"The environment {config.name} cannot be imported: {error}.") from None
    finally:
        sys.path.remove("")
    try:
        environment = make(**config.options)
    except TypeError as error:
        raise UserError(f"environment.options do not fit {config.name}: {error}.") from None
    lacking = [part for part in ("name", "max_turns", "tasks", "start") if not hasattr(environment, part)]
    if lacking:
        raise UserError(
            f"The environment {config.name} lacks {', '.join(lacking)}; see lopd_fast/envs/base.py for the protocol."
        )
    return environment
