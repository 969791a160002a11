"""The typed configuration: dataclasses whose defaults are the paper's, filled from YAML and `section.key=value` words.

An unknown key is refused with the nearest known name; a value of the wrong type with the key and what it wants.
"""

import dataclasses
import difflib
import json
import re
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from lopd_fast.errors import UserError

_strict = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False)
Divergence = Literal["reverse_kl", "forward_kl", "jsd"]
FREE_FORM = ("environment.options.", "model.template_options.")  # sections whose keys are not ours to know


@checked(config=_strict)
class LoraConfig:
    """A low-rank adapter on the seven projections of every block."""

    rank: int = Field(default=8, ge=1)
    alpha: int = Field(default=16, ge=1)


@checked(config=_strict)
class ModelConfig:
    """The backbone: one frozen model that student, encoder and teacher share."""

    path: str = ""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    device: str = "auto"
    attention: str = "sdpa"
    gradient_checkpointing: bool = False
    activation_offload: bool = False  # CUDA: checkpoints wait in host memory for the backward
    liger_kernels: bool = (
        True  # CUDA: Liger's RMSNorm, rotary embedding and SwiGLU where liger-kernel is installed
    )
    template_options: dict[str, Any] = field(
        default_factory=dict
    )  # of the chat template: enable_thinking, ...
    shard: bool = (
        False  # of several processes, each keeps a part of the frozen weights (FSDP2), not all of them
    )
    trust_remote_code: bool = False  # the one switch, for model, tokenizer, config and encoder


@checked(config=_strict)
class StudentConfig:
    """How theta is trained: a LoRA on the shared backbone, or own full weights."""

    mode: Literal["lora", "full"] = "lora"
    lora: LoraConfig = field(default_factory=LoraConfig)


@checked(config=_strict)
class ComposerConfig:
    """Encoder LoRA and QFormer (design: 32 queries, 8 weight-sharing layers)."""

    num_queries: int = Field(default=32, ge=1)
    depth: int = Field(default=8, ge=1)
    heads: int | None = Field(default=None, ge=1)  # None: as many as the backbone has
    ff_mult: int = Field(default=4, ge=1)
    share_layers: bool = True
    lora: LoraConfig = field(default_factory=LoraConfig)
    max_memory_tokens: int = Field(default=8192, ge=8)  # longest "task + trace" the encoder reads
    encoder_batch_tokens: int = Field(default=8192, ge=1)  # tokens the encoder reads at once


@checked(config=_strict)
class RetrievalConfig:
    """The experience bank and who is asked: J nearest experiences a task."""

    bank: str = ""
    encoder: str = ""  # a sentence-transformers folder; empty: the packaged all-MiniLM-L6-v2
    query_prompt: str = ""
    document_prompt: str = ""
    neighbours: int = Field(default=3, ge=1)
    allow_self: bool = False
    within_group: bool = False  # a task sees its own group's experiences alone, as tenants must
    grow: bool = True  # successes of the rollouts join the bank
    shuffle: bool = False  # ablation: experiences of a random entry in place of the nearest


@checked(config=_strict)
class EnvironmentConfig:
    """Which environment, and what it is built with."""

    name: str = ""  # one of ours, or module:Class of your own
    options: dict[str, Any] = field(default_factory=dict)
    train_tasks: int = Field(default=256, ge=1)
    heldout_tasks: int = Field(default=64, ge=1)


@checked(config=_strict)
class RolloutConfig:
    """The behaviour policy: sampling as in the paper."""

    engine: Literal["hf", "vllm"] = "hf"
    vllm_memory: float = Field(
        default=0.4, gt=0, lt=1
    )  # share of the GPU's memory that vLLM takes while it samples
    temperature: float = Field(default=0.7, gt=0)
    top_p: float = Field(default=0.95, gt=0, le=1)
    top_k: int = Field(default=20, ge=0)
    max_new_tokens: int = Field(default=1024, ge=1)  # per turn
    max_tokens: int = Field(default=40_960, ge=2)  # prompt + all turns
    batch_size: int = Field(default=32, ge=1)
    merge_lora: bool = True  # sample from a merged copy of the student: faster, one more copy of its weights


@checked(config=_strict)
class OptimConfig:
    """AdamW, as the paper sets it. Learning rates may differ between theta, encoder LoRA and QFormer."""

    kind: Literal["adamw", "adamw8bit", "paged_adamw8bit"] = "adamw"  # the others by bitsandbytes
    lr: float = Field(default=1e-5, gt=0)
    encoder_lr: float | None = Field(default=None, gt=0)  # None: lr
    qformer_lr: float | None = Field(default=None, gt=0)  # None: lr
    weight_decay: float = Field(default=0.0, ge=0)
    clip: float = Field(default=1.0, gt=0)
    warmup_steps: int = Field(default=0, ge=0)
    decay_share: float = Field(default=0.0, ge=0, le=1)  # last share of the steps, over which rates fall to 0


@checked(config=_strict)
class ExploreConfig:
    """Successes of the base itself, with earlier successes shown as chat turns, before cold start."""

    seeds: int = Field(default=0, ge=0)  # demonstrations by the environment itself, the first experiences
    tasks: int = Field(default=64, ge=0)  # attempts
    rounds: int = Field(default=2, ge=1)  # later rounds are shown the successes of earlier ones
    shots: int = Field(default=3, ge=0)
    per_group: int | None = Field(default=None, ge=1)  # successes kept of each group of tasks; None: all


@checked(config=_strict)
class ColdStartConfig:
    """phi_0 by next-token NLL on successful trajectories."""

    steps: int = Field(default=200, ge=0)
    batch_size: int = Field(default=8, ge=1)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(clip=3.0))


@checked(config=_strict)
class LossConfig:
    """The distillation loss. `first_divergence` is used for the first `first_share` of the steps."""

    k: int = Field(default=20, ge=1)
    support: Literal["teacher", "student"] = "teacher"
    divergence: Divergence = "reverse_kl"
    tail: Literal["bucket", "renormalize", "drop"] = "bucket"
    beta: float = Field(default=0.5, gt=0, lt=1)  # of jsd
    temperature: float = Field(default=1.0, gt=0)
    first_divergence: Divergence = "reverse_kl"
    first_share: float = Field(default=0.0, ge=0, le=1)


@checked(config=_strict)
class ObjectiveConfig:
    """Privileged margin, its dual variable, and the anchor."""

    margin: float = 0.05
    dual_lr: float = Field(default=0.5, ge=0)
    beta_init: float = Field(default=0.0, ge=0)
    anchor: float = Field(default=0.2, ge=0)
    teacher_warmup: float = Field(default=0.0, ge=0, le=1)  # first share of the steps trains phi alone
    freeze_composer: bool = False  # ablation
    use_latents: bool = True  # ablation: False shows the teacher the experiences' task alone


@checked(config=_strict)
class MonitorConfig:
    """What is measured beside training, which it never changes; 0 leaves a measurement out."""

    gap_every: int = Field(
        default=1, ge=0
    )  # steps between two readings of the gap of right and other experiences
    gap_rollouts: int = Field(default=2, ge=1)  # of the step, that are read for it
    reward_every: int = Field(
        default=25, ge=0
    )  # steps between two attempts of the teacher at the step's tasks
    reward_tasks: int = Field(default=32, ge=1)  # that it attempts, at most


@checked(config=_strict)
class TrainConfig:
    """The loop."""

    steps: int = Field(default=200, ge=1)
    tasks_per_step: int = Field(default=32, ge=1)
    rollouts_per_task: int = Field(default=1, ge=1)
    micro_batch_tokens: int = Field(default=8192, ge=1)  # of the student, or one rollout; in cold start too
    checkpoint_every: int = Field(default=20, ge=1)
    keep_checkpoints: int = Field(default=2, ge=1)
    trackers: list[Literal["tensorboard", "wandb"]] = field(default_factory=lambda: ["tensorboard"])
    wandb_project: str = Field(default="lopd-fast", min_length=1)
    seed: int = Field(default=0, ge=0, lt=2**31)
    out: str = "runs/lopd"


@checked(config=_strict)
class Config:
    """Everything a run is made of."""

    model: ModelConfig = field(default_factory=ModelConfig)
    student: StudentConfig = field(default_factory=StudentConfig)
    composer: ComposerConfig = field(default_factory=ComposerConfig)
    retrieval: RetrievalConfig = field(default_factory=RetrievalConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    explore: ExploreConfig = field(default_factory=ExploreConfig)
    cold_start: ColdStartConfig = field(default_factory=ColdStartConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    train: TrainConfig = field(default_factory=TrainConfig)


def load_config(
    path: str | Path | None = None, overrides: list[str] | None = None, base: Config | None = None
) -> Config:
    """The configuration of a YAML file (or `base`, or the defaults) with `section.key=value` words laid over it.

    Raises:
        UserError: no such file, not YAML, an unknown key (the nearest name is given), or a value of the wrong type.
    """
    tree = to_dict(base or Config())
    if path is not None:
        _merge(tree, _read_yaml(Path(path)), str(path))
    for word in overrides or []:
        key, separator, text = word.partition("=")
        if not separator:
            raise UserError(
                f"'{word}' is not an override; write section.key=value, for example optim.lr=1e-5."
            )
        value = _yaml(text, f"The value of '{word}'")
        nested: dict[str, Any] = {}
        inner = nested
        *parents, last = key.split(".")
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = value
        _merge(tree, nested, "the command line")
    return _validated(tree)


def to_dict(config: Config) -> dict[str, Any]:
    """The configuration as plain dictionaries, ready for YAML or JSON."""
    return dataclasses.asdict(config)  # pyright: ignore[reportArgumentType]


def save_config(config: Config, path: Path) -> None:
    """Write `config` as JSON (which YAML readers read too)."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(to_dict(config), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(path)


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"There is no config file at {path}.")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as text: {error}.") from None
    tree = _yaml(text, str(path)) or {}
    if not isinstance(tree, dict):
        raise UserError(f"{path} must hold sections such as 'train:', not a {type(tree).__name__}.")
    return tree


def _merge(tree: dict[str, Any], new: dict[str, Any], source: str, prefix: str = "") -> None:
    """Lay `new` over `tree` in place; every key must exist already, except inside the free-form sections."""
    free = prefix.startswith(FREE_FORM)
    for key, value in new.items():
        name = f"{prefix}{key}"
        if key not in tree and not free:
            near = difflib.get_close_matches(str(key), list(tree), n=1, cutoff=0.5)
            hint = f"did you mean '{prefix}{near[0]}'?" if near else f"known here: {', '.join(tree)}."
            raise UserError(f"Unknown key '{name}' in {source}; {hint}")
        if isinstance(tree.get(key), dict) and (isinstance(value, dict) or not free):
            if not isinstance(value, dict):
                raise UserError(
                    f"'{name}' in {source} is a section; give its keys, for example {name}.{_first(tree[key])}=..."
                )
            _merge(tree[key], value, source, f"{name}.")
        else:
            tree[key] = value


def _first(tree: dict[str, Any]) -> str:
    return next(iter(tree), "key")


def _validated(tree: dict[str, Any]) -> Config:
    try:
        return TypeAdapter(Config).validate_python(tree)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise UserError(
            f"'{name}' is {first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}."
        ) from None


class _Loader(yaml.SafeLoader):
    """YAML 1.1, except that 1e-5 is a number, as in YAML 1.2 and JSON, and 2026-01-31 is text, as in those."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _yaml(text: str, name: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader: builds plain data only
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an integer of thousands of digits
        raise UserError(f"{name} is not valid YAML: {' '.join(str(error).split())}.") from None
