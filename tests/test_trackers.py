"""TensorBoard for real, and W&B behind a stand-in that takes what W&B takes: both through accelerate's trackers."""

import importlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lopd_fast.build import build
from lopd_fast.config import Config
from lopd_fast.errors import UserError
from lopd_fast.metrics import MetricsLog, read_metrics
from lopd_fast.runs import Run
from lopd_fast.trackers import check_trackers, start_trackers

# W&B's init, Run and config, with the arguments that are used of them; a line for every call.
WANDB = """
import json, os
from pathlib import Path

def _note(*call):
    with open(Path(__file__).with_name("calls.jsonl"), "a") as file:
        file.write(json.dumps(call) + "\\n")

class Run:
    def define_metric(self, name, step_metric=None):
        _note("define", name, step_metric)
    def log(self, data, step=None):
        assert all(isinstance(value, (int, float)) for value in data.values())
        _note("log", data, step)
    def finish(self, exit_code=None):
        _note("finish")

class Config:
    def update(self, d, allow_val_change=None):
        _note("config", d["train"]["steps"], allow_val_change)

config = Config()

def init(entity=None, project=None, dir=None, id=None, name=None, config=None, mode=None, resume=None):
    if os.environ.get("WANDB_MODE") != "offline":
        raise RuntimeError("api_key not configured (no-tty). call wandb.login(key=[your_api_key])\\nmore lines")
    _note("init", project, dir, id, name, resume)
    return Run()
"""


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The stand-in as a package that Python finds, offline; the file that its calls are in."""
    folder = tmp_path / "site" / "wandb"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(WANDB)
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    yield folder / "calls.jsonl"
    sys.modules.pop("wandb", None)


def calls(path: Path, *names: str) -> list[Any]:
    return [call[1:] for call in map(json.loads, path.read_text().splitlines()) if call[0] in names]


def config(out: Path, *words: str) -> Config:
    return tiny.config(f"train.out={out}", *words)


def log(settings: Config, first: int, last: int, done: int = 0, stage: str = "") -> None:
    trackers = start_trackers(settings, stage, done)
    with MetricsLog(Path(settings.train.out) / stage, done or None, trackers) as metrics:
        for step in range(first, last + 1):
            values = {"step": step, "kl": step / 3, "group_rewards": {"a": 1.0}, "skipped": False}
            metrics.write(values | {"loss": math.nan, "divergence": "jsd", "messages": ["warning"]})


def test_tensorboard_has_the_numbers_and_hides_what_was_abandoned(tmp_path: Path):
    log(config(tmp_path), 1, 3)
    log(config(tmp_path), 2, 2, done=1)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == {"kl", "group_rewards/a", "skipped"}
    assert [(event.step, event.value) for event in events.Scalars("kl")] == [
        (1, pytest.approx(1 / 3)),
        (2, pytest.approx(2 / 3)),
    ]
    assert not (tmp_path / "wandb_id").exists()


def test_wandb_goes_on_under_the_same_id(tmp_path: Path, wandb: Path):
    out = tmp_path / "mine"
    settings = config(out, "train.trackers=[wandb]", "train.wandb_project=things", "train.steps=7")
    log(settings, 1, 2, stage="cold_start")
    log(settings, 1, 3)
    log(settings, 2, 2, done=1)  # after a kill: a step again
    (project, folder, run_id, name, resume), *others = calls(wandb, "init")
    assert (project, folder, name, resume) == ("things", str(out), "mine", "allow") and len(run_id) >= 8
    assert others == [[project, folder, run_id, name, resume]] * 2
    assert calls(wandb, "config") == [[7, True]] * 3 and len(calls(wandb, "finish")) == 3
    assert calls(wandb, "define") == [["step", None], ["*", "step"]] * 3
    logged = calls(wandb, "log")
    assert all(step is None for _, step in logged), "W&B drops what is logged under an earlier step"
    assert logged[0][0] == {
        "cold_start/kl": 1 / 3,
        "cold_start/group_rewards/a": 1.0,
        "cold_start/skipped": False,
        "step": 1,
    }
    assert [data["step"] for data, _ in logged] == [1, 2, 1, 2, 3, 2] and logged[-1][0]["kl"] == 2 / 3
    assert not (out / "tensorboard").exists()

    log(config(tmp_path / "another", "train.trackers=[wandb]"), 1, 1)
    assert calls(wandb, "init")[-1][2] != run_id


def test_a_stopped_run_reports_all_its_stages_to_both(tmp_path: Path, wandb: Path):
    words = ["train.steps=2", "cold_start.steps=2", "rollout.max_new_tokens=3", "monitor.reward_every=0"]
    parts = tiny.parts(f"train.out={tmp_path}", "train.trackers=[tensorboard,wandb]", *words, bank=0)
    run = Run(parts, say=lambda line: None)
    run.open(resume=False)
    tasks = parts.environment.tasks("train", 4, 0)
    run.seed(tasks)
    run.cold_start()
    run.distil(tasks)
    run.distil(tasks)  # a resume that finds nothing left to do
    ids = {call[2] for call in calls(wandb, "init")}
    assert len(calls(wandb, "init")) == 3 and len(ids) == 1
    logged = [data for data, _ in calls(wandb, "log")]
    assert [data["step"] for data in logged] == [1, 2, 1, 2]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    for line, data in zip(read_metrics(tmp_path / "metrics.jsonl"), logged[2:], strict=True):
        assert data["kl"] == line["kl"] and data["phases/rollout"] == line["phases"]["rollout"]
    assert [event.value for event in events.Scalars("kl")] == pytest.approx(
        [data["kl"] for data in logged[2:]]
    )


def test_what_is_missing_is_one_sentence(tmp_path: Path, wandb: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("WANDB_MODE")
    with pytest.raises(UserError) as caught:
        start_trackers(config(tmp_path, "train.trackers=[wandb]"))
    said = str(caught.value)
    assert said.startswith("W&B does not start (api_key not configured") and "more lines" not in said
    assert "WANDB_MODE=offline" in said

    check_trackers(["tensorboard", "wandb"])
    (wandb.parent / "__init__.py").unlink()  # a mere folder is left
    monkeypatch.delitem(sys.modules, "wandb")
    importlib.invalidate_caches()
    for found in (check_trackers, lambda names: build(tiny.config(f"train.trackers=[{names[0]}]"))):
        with pytest.raises(
            UserError, match="train.trackers names wandb, which is not installed here; run: pip"
        ):
            found(["wandb"])
    assert start_trackers(config(tmp_path, "train.trackers=[]")) == []
