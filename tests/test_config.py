"""The configuration: what is given is what is got, and each mistake is one sentence that names the key."""

import json
from pathlib import Path
from typing import Any

import pytest

from lopd_fast.config import Config, load_config, save_config, to_dict
from lopd_fast.errors import UserError


def refuse(*overrides: str, path: Path | None = None) -> str:
    """The one sentence that `load_config` refuses these with."""
    with pytest.raises(UserError) as caught:
        load_config(path, list(overrides))
    message = str(caught.value)
    assert "\n" not in message
    return message


def in_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_are_the_papers():
    config = load_config()
    assert config == Config()
    objective = config.objective
    assert (objective.margin, objective.dual_lr, objective.anchor, config.loss.k) == (0.05, 0.5, 0.2, 20)
    assert (config.optim.lr, config.optim.clip, config.cold_start.optim.clip) == (1e-5, 1.0, 3.0)
    assert (config.composer.num_queries, config.composer.depth, config.retrieval.neighbours) == (32, 8, 3)
    assert (config.rollout.temperature, config.rollout.top_p, config.rollout.top_k) == (0.7, 0.95, 20)
    assert not config.model.trust_remote_code


def test_words_are_laid_over_the_file_and_the_file_over_the_base(tmp_path: Path):
    base = load_config(overrides=["train.seed=1", "train.steps=1", "optim.clip=9"])
    path = in_file(tmp_path, "train: {steps: 2, tasks_per_step: 2}\ncold_start:\n  optim:\n    lr: 3e-4\n")
    words = ["train.tasks_per_step=3", "train.tasks_per_step=4", "student.lora.rank=2"]
    config = load_config(path, words, base)
    expected = to_dict(Config())
    expected["train"] |= {"seed": 1, "steps": 2, "tasks_per_step": 4}
    expected["optim"]["clip"] = 9.0
    expected["cold_start"]["optim"]["lr"] = 3e-4
    expected["student"]["lora"]["rank"] = 2
    assert to_dict(config) == expected
    assert base.train.steps == 1 and load_config() == Config(), "neither base nor defaults are written to"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E-5", 1e-5),
        ("2.5e-7", 2.5e-7),
        (".5e-3", 5e-4),
        ("1.e+2", 100.0),
        ("3e2", 300.0),
        ("7", 7.0),
        ("0.25", 0.25),
    ],
)
def test_numbers_however_they_are_written(text: str, value: float, tmp_path: Path):
    assert load_config(overrides=[f"optim.lr={text}"]).optim.lr == value
    assert load_config(in_file(tmp_path, f"optim:\n  lr: {text}\n")).optim.lr == value


def test_text_that_looks_like_something_else_is_text(tmp_path: Path):
    text = 'environment: {name: "1e5", options: {day: 2026-01-31, table: [1e-3, "1e-3", e5, 1e]}}'
    config = load_config(in_file(tmp_path, text), ["train.out=2026-01-31", "model.path='7'"])
    assert (config.environment.name, config.train.out, config.model.path) == ("1e5", "2026-01-31", "7")
    assert config.environment.options == {"day": "2026-01-31", "table": [0.001, "1e-3", "e5", "1e"]}
    assert load_config(overrides=["train.out=a=b"]).train.out == "a=b"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("train.step=3", "Unknown key 'train.step' in the command line; did you mean 'train.steps'?"),
        ("trian.steps=3", "Unknown key 'trian' in the command line; did you mean 'train'?"),
        ("student.lora.ranks=3", "did you mean 'student.lora.rank'?"),
        ("cold_start.optim.learning=3", "known here: kind, lr, encoder_lr,"),
        ("objective.zzzz=3", "known here: margin, dual_lr,"),
        ("=3", "Unknown key '' in the command line"),
        ("train..steps=3", "Unknown key 'train.'"),
        ("train.steps", "'train.steps' is not an override; write section.key=value"),
        ("train=5", "'train' in the command line is a section; give its keys, for example train.steps="),
        ("student.lora=8", "'student.lora' in the command line is a section"),
        ("environment.options=8", "'environment.options' in the command line is a section"),
        ("train.steps=[1", "The value of 'train.steps=[1' is not valid YAML"),
        ("train.steps=" + "9" * 5000, "is not valid YAML"),
        (
            "train.out=!!python/object/apply:os.getcwd []",
            "is not valid YAML: could not determine a constructor",
        ),
    ],
)
def test_a_word_that_cannot_be_laid_over(word: str, message: str):
    assert message in refuse(word)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("train.steps=1.5", "'train.steps' is 1.5: input should be a valid integer"),
        ("train.steps=many", "'train.steps' is 'many': input should be a valid integer"),
        ("train.steps=0", "'train.steps' is 0: input should be greater than or equal to 1."),
        ("train.steps.x=5", "'train.steps' is {'x': 5}: input should be a valid integer."),
        ("train.out=2026", "'train.out' is 2026: input should be a valid string."),
        ("train.out=", "'train.out' is None: input should be a valid string."),
        ("optim.lr=-1e-5", "'optim.lr' is -1e-05: input should be greater than 0."),
        ("optim.lr=.inf", "'optim.lr' is inf: input should be a finite number."),
        ("objective.margin=.nan", "'objective.margin' is nan: input should be a finite number."),
        ("cold_start.optim.clip=no", "'cold_start.optim.clip' is"),
        ("student.mode=lroa", "'student.mode' is 'lroa': input should be 'lora' or 'full'."),
        ("loss.divergence=kl", "input should be 'reverse_kl', 'forward_kl' or 'jsd'."),
        ("loss.beta=1", "'loss.beta' is 1: input should be less than 1."),
        ("rollout.top_p=1.1", "'rollout.top_p' is 1.1: input should be less than or equal to 1."),
        ("composer.heads=0", "'composer.heads' is 0: input should be greater than or equal to 1."),
        (
            "model.trust_remote_code=maybe",
            "'model.trust_remote_code' is 'maybe': input should be a valid boolean",
        ),
    ],
)
def test_a_value_of_the_wrong_type_or_size(word: str, message: str):
    assert message in refuse(word)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {step: 3}", "Unknown key 'train.step' in {path}; did you mean 'train.steps'?"),
        ("1: 2", "Unknown key '1' in {path}"),
        ("train:", "'train' in {path} is a section"),
        ("train: [steps]", "'train' in {path} is a section"),
        ("- train", "{path} must hold sections such as 'train:', not a list."),
        ("a: b: c", "{path} is not valid YAML: mapping values are not allowed here"),
        ("train: {steps: '3.5'}", "'train.steps' is '3.5'"),
    ],
)
def test_a_file_with_a_mistake(text: str, message: str, tmp_path: Path):
    path = in_file(tmp_path, text)
    assert message.format(path=path) in refuse(path=path)


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path):
    assert refuse(path=tmp_path / "absent.yaml") == f"There is no config file at {tmp_path / 'absent.yaml'}."
    assert refuse(path=tmp_path) == f"There is no config file at {tmp_path}."
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\xff\xfe\x00")
    assert f"{path} cannot be read as text" in refuse(path=path)
    path.write_bytes(b"")
    assert load_config(path) == Config()


def test_options_of_the_environment_are_free(tmp_path: Path):
    path = in_file(tmp_path, "environment: {options: {tables: {rows: 3, names: [a]}, hints: yes}}")
    words = [
        "environment.options.tables.columns=2",
        "environment.options.tables.rows=4",
        "environment.options.hints.first=1",
        "environment.options.seed=1e3",
    ]
    options: dict[str, Any] = load_config(path, words).environment.options
    assert options == {
        "tables": {"rows": 4, "names": ["a"], "columns": 2},
        "hints": {"first": 1},
        "seed": 1000.0,
    }
    assert load_config(path, ["environment.options.tables=none"]).environment.options["tables"] == "none"
    template = load_config(None, ["model.template_options.enable_thinking=false"]).model.template_options
    assert template == {"enable_thinking": False}


def test_round_trip_through_the_saved_file(tmp_path: Path):
    words = [
        "optim.lr=1.5e-7",
        "optim.encoder_lr=1e-300",
        "composer.heads=4",
        "objective.margin=0.30000000000000004",
        "train.out=läufe/😀/1",
        "environment.name='1e5'",
        "environment.options={'1e-5': [1e-5, '1e-5', true, null, {deep: 2026-01-31}], 'yes': \"tab\\tand µ\"}",
    ]
    config = load_config(overrides=words)
    path = tmp_path / "config.json"
    save_config(config, path)
    assert load_config(path) == config
    assert json.loads(path.read_text(encoding="utf-8")) == to_dict(config)
