"""Saving behind the training: what is saved is what was there at that moment, and no failure of it is lost."""

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lopd_fast import checkpoint, checkpoint_writer
from lopd_fast.checkpoint import latest_good, load_checkpoint
from lopd_fast.checkpoint_writer import CheckpointWriter
from lopd_fast.errors import UserError


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is written before the gate is set."""
    opened = threading.Event()
    save_file = checkpoint.save_file

    def wait(*arguments: Any) -> None:
        assert opened.wait(20)
        save_file(*arguments)

    monkeypatch.setattr(checkpoint, "save_file", wait)
    yield opened
    opened.set()


def full_disk(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """Saves of `steps` meet a full disk in the middle of their files."""

    def fill_up(folder: Path) -> None:
        (folder / "half").write_bytes(b"x")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    inner = checkpoint_writer.save_checkpoint

    def save(root: Path, step: int, *arguments: Any, **options: Any) -> Path:
        return inner(root, step, *arguments, **{**options, "extra": fill_up if step in steps else None})

    monkeypatch.setattr(checkpoint_writer, "save_checkpoint", save)


def test_what_is_saved_is_what_was_there(tmp_path: Path, gate: threading.Event):
    wide = torch.arange(6.0).reshape(2, 3)
    groups = {"student": {"weight": wide, "tied": wide, "turned": wide.T, "half": torch.ones(2).half()}}
    before = {name: tensor.clone() for name, tensor in groups["student"].items()}
    seen, state = [1], {"beta": 0.1}
    with CheckpointWriter(tmp_path) as writer:
        writer.save(1, groups, {**state, "seen": seen})
        for tensor in groups["student"].values():  # a step, while nothing is on the disk yet
            tensor.add_(1)
        seen.append(2)
        groups["student"]["more"] = wide
        assert latest_good(tmp_path) is None
        gate.set()
    loaded = load_checkpoint(tmp_path / "step-000001")
    assert loaded.state == {"beta": 0.1, "seen": [1]} and loaded.tensors["student"].keys() == before.keys()
    for name, tensor in before.items():
        found = loaded.tensors["student"][name]
        assert torch.equal(found, tensor) and found.dtype == tensor.dtype, name


def test_one_save_at_a_time_and_rotated_in_their_order(tmp_path: Path, gate: threading.Event):
    threading.Timer(0.2, gate.set).start()
    with CheckpointWriter(tmp_path, keep=2) as writer:
        for step in (1, 2, 3):
            writer.save(step, {"a": {"b": torch.full((2,), float(step))}}, {})
            assert step == 1 or gate.is_set()  # the second save waited for the first
            assert sum(thread.name.startswith("checkpoint") for thread in threading.enumerate()) <= 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000003"]


def test_a_full_disk_is_said_and_the_next_save_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    full_disk(monkeypatch, {2})
    said: list[str] = []
    with CheckpointWriter(tmp_path, keep=1, say=said.append) as writer:
        for step in (1, 2):
            writer.save(step, {"a": {"b": torch.ones(1)}}, {})
        writer._wait()
        assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
        writer.save(3, {"a": {"b": torch.ones(1)}}, {})
        writer.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["step-000003"]
    assert said == [
        f"warning: Step 2 cannot be saved in {tmp_path}: the disk has no room for its 4 bytes; the checkpoints before "
        "it are untouched. The run goes on without it."
    ]


def test_a_last_save_that_failed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    full_disk(monkeypatch, {2})
    with CheckpointWriter(tmp_path, say=lambda line: None) as writer:
        for step in (1, 2):
            writer.save(step, {}, {})
    with pytest.raises(UserError, match="Step 2 cannot be saved"):
        writer.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_an_exception_of_the_block_waits_for_the_write(tmp_path: Path, gate: threading.Event):
    with pytest.raises(KeyboardInterrupt), CheckpointWriter(tmp_path) as writer:
        writer.save(1, {"a": {"b": torch.ones(1)}}, {})
        threading.Timer(0.2, gate.set).start()
        raise KeyboardInterrupt
    assert latest_good(tmp_path) is not None


def test_a_fault_of_the_program_is_not_taken_for_a_full_disk(tmp_path: Path):
    def fault(folder: Path) -> None:
        raise KeyError("no bank")

    with pytest.raises(KeyError, match="no bank"), CheckpointWriter(tmp_path) as writer:
        writer.save(1, {}, {}, extra=fault)
        writer.save(2, {}, {})
        pytest.fail("the next save did not raise it")
    with pytest.raises(KeyError, match="no bank"), CheckpointWriter(tmp_path) as writer:
        writer.save(1, {}, {}, extra=fault)
        writer.finish()
    with pytest.raises(TypeError, match="Tensor is not JSON"), CheckpointWriter(tmp_path) as writer:
        writer.save(1, {}, {"beta": torch.ones(1)})
    assert list(tmp_path.iterdir()) == []


def test_an_interpreter_that_ends_waits_for_the_write(tmp_path: Path):
    code = (
        "import sys, time, torch; from lopd_fast.checkpoint_writer import CheckpointWriter\n"
        "writer = CheckpointWriter(sys.argv[1])\n"
        "writer.save(1, {'a': {'b': torch.ones(1)}}, {}, extra=lambda folder: time.sleep(0.5))\n"
        "raise KeyboardInterrupt\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode != 0 and "KeyboardInterrupt" in done.stderr
    loaded = latest_good(tmp_path)
    assert loaded is not None and loaded.step == 1
