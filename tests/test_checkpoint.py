"""Checkpoints: what is saved comes back bit for bit, and a kill or a full disk costs one save at most."""

import errno
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from lopd_fast import checkpoint
from lopd_fast.checkpoint import (
    latest_checkpoint,
    latest_good,
    load_checkpoint,
    optimizer_tensors,
    restore_optimizer,
    save_checkpoint,
)
from lopd_fast.errors import UserError


def save(root: Path, step: int, keep: int = 2, size: int = 8, note: str = "") -> Path:
    """A checkpoint every part of which says which step it is of."""
    groups = {name: {"value": torch.full((size,), float(step))} for name in ("student", "composer")}

    def extra(folder: Path) -> None:
        (folder / "bank").mkdir()
        (folder / "bank" / "bank.json").write_text(str(step))

    return save_checkpoint(root, step, groups, {"of": step, "note": note}, extra=extra, keep=keep)


def check_whole(root: Path) -> int:
    """The step of the newest checkpoint, all of whose parts are of that step."""
    loaded = latest_good(root)
    assert loaded is not None
    assert loaded.state["of"] == loaded.step
    assert (loaded.path / "bank" / "bank.json").read_text() == str(loaded.step)
    assert set(loaded.tensors) == {"student", "composer"}
    for group in loaded.tensors.values():
        assert (group["value"] == loaded.step).all()
    return loaded.step


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_round_trip_is_exact(tmp_path: Path):
    wide = torch.randn(4, 6)
    tensors = {
        "student": {
            "half": torch.randn(3, 5).bfloat16(),
            "scalar": torch.tensor(2**40 + 1),
            "empty": torch.zeros(0, 7),
            "transposed": wide.T,
            "columns": wide[:, 1:3],
            "trained": nn.Parameter(torch.randn(2)),
        },
        "nothing": {},
    }
    state = {"beta": 0.1 + 0.2, "seen": [1, 2], "name": "µ"}
    path = save_checkpoint(tmp_path / "run" / "checkpoints", 10, tensors, state)
    loaded = load_checkpoint(path)
    assert path.name == "step-000010" and loaded.path == path
    assert (loaded.step, loaded.state) == (10, state)
    assert loaded.tensors.keys() == tensors.keys() and not loaded.tensors["nothing"]
    for name, tensor in tensors["student"].items():
        again = loaded.tensors["student"][name]
        assert again.dtype == tensor.dtype and torch.equal(again, tensor), name


def test_tied_and_overlapping_tensors_are_each_written_in_full(tmp_path: Path):
    table = torch.randn(6, 4)
    tensors = {"embed": table, "head": table, "row": table[2], "tail": table[3:]}
    loaded = load_checkpoint(save_checkpoint(tmp_path, 1, {"model": tensors}, {}))
    for name, tensor in tensors.items():
        assert torch.equal(loaded.tensors["model"][name], tensor), name


def test_only_safetensors_and_json_are_written(tmp_path: Path):
    folder = save_checkpoint(tmp_path, 3, {"student": {"w": torch.ones(1)}}, {})
    assert names(folder) == ["state.json", "student.safetensors"]


def test_the_newest_are_kept(tmp_path: Path):
    for step in (1, 2, 3, 9, 10):
        save(tmp_path, step, keep=3)
    assert names(tmp_path) == ["step-000003", "step-000009", "step-000010"]
    save(tmp_path, 1_000_000, keep=1)
    assert names(tmp_path) == ["step-1000000"] and check_whole(tmp_path) == 1_000_000


def test_going_back_replaces_the_steps_of_the_abandoned_run(tmp_path: Path):
    for step in (10, 20, 30):
        save(tmp_path, step, keep=3, note="first")
    save(tmp_path, 20, keep=3, note="second")
    assert names(tmp_path) == ["step-000010", "step-000020"]
    loaded = latest_good(tmp_path)
    assert loaded is not None and (loaded.step, loaded.state["note"]) == (20, "second")


def test_no_checkpoint_is_none(tmp_path: Path):
    assert latest_checkpoint(tmp_path) is None and latest_good(tmp_path / "absent") is None
    with pytest.raises(UserError, match="no checkpoint at"):
        load_checkpoint(tmp_path / "step-000001")


def edit_state(folder: Path, **changes: object) -> None:
    path = folder / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda folder: os.truncate(folder / "student.safetensors", 40), "has 40 bytes where"),
    "missing": (lambda folder: (folder / "composer.safetensors").unlink(), "composer.safetensors is missing"),
    "extra missing": (lambda folder: shutil.rmtree(folder / "bank"), "bank/bank.json is missing"),
    "no state": (lambda folder: (folder / "state.json").unlink(), "state.json cannot be read"),
    "torn state": (lambda folder: os.truncate(folder / "state.json", 30), "state.json cannot be read"),
    "other JSON": (lambda folder: (folder / "state.json").write_text("[1]"), "state.json cannot be read"),
    "no key": (lambda folder: edit_state(folder, files=None), "'files' is a NoneType"),
    "other format": (
        lambda folder: edit_state(folder, format=99),
        "has format 99; this version reads format 1",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_one_sentence_and_the_step_before_is_found(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    before, newest = save(tmp_path, 1), save(tmp_path, 2)
    damage, message = DAMAGE[kind]
    damage(newest)
    with pytest.raises(UserError, match=message) as caught:
        load_checkpoint(newest)
    assert str(newest) in str(caught.value) and "\n" not in str(caught.value)
    assert latest_checkpoint(tmp_path) == before
    assert check_whole(tmp_path) == 1
    assert capsys.readouterr().err == f"warning: {caught.value}\n"
    save(tmp_path, 2)
    assert check_whole(tmp_path) == 2 and names(tmp_path) == ["step-000001", "step-000002"]


def test_damage_that_leaves_the_size_is_found_on_loading(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    save(tmp_path, 1)
    path = save(tmp_path, 2) / "student.safetensors"
    content = bytearray(path.read_bytes())
    content[:8] = b"\xff" * 8  # the length of the header
    path.write_bytes(content)
    assert latest_checkpoint(tmp_path) == path.parent
    assert check_whole(tmp_path) == 1
    assert "step-000002 is damaged (student.safetensors cannot be read" in capsys.readouterr().err


def test_wrong_count_of_tensors(tmp_path: Path):
    folder = save(tmp_path, 1)
    path = folder / "student.safetensors"
    save_file({"value": torch.ones(2), "other": torch.ones(2)}, path)
    files = json.loads((folder / "state.json").read_text())["files"]
    edit_state(folder, files={**files, path.name: path.stat().st_size})
    with pytest.raises(UserError, match="student.safetensors has 2 tensors where 1 were saved"):
        load_checkpoint(folder)


def test_all_damaged_does_not_start_afresh_silently(tmp_path: Path):
    for folder in [save(tmp_path, step) for step in (1, 2)]:
        (folder / "state.json").unlink()
    assert latest_checkpoint(tmp_path) is None
    with pytest.raises(UserError, match="None of the 2 checkpoints in .* delete them to start afresh"):
        latest_good(tmp_path)


def test_state_that_is_not_json_is_refused_before_anything_is_written(tmp_path: Path):
    save(tmp_path, 1)
    with pytest.raises(TypeError, match="Tensor is not JSON"):
        save_checkpoint(tmp_path, 2, {}, {"beta": torch.ones(1)})
    assert names(tmp_path) == ["step-000001"]


def test_a_disk_too_small_is_seen_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save(tmp_path, 1, keep=1)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 37, 63))
    monkeypatch.setattr(checkpoint, "save_file", lambda *arguments: pytest.fail("nothing may be written"))
    with pytest.raises(UserError, match="no room for its 64 bytes") as caught:
        save(tmp_path, 2, keep=1)
    assert str(tmp_path) in str(caught.value)
    assert names(tmp_path) == ["step-000001"]


def raises(error: Exception) -> Callable[..., None]:
    def function(*arguments: object) -> None:
        raise error

    return function


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_leaves_the_checkpoints_before(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    save(tmp_path, 1, keep=1)
    full = OSError(number, os.strerror(number))
    with pytest.raises(UserError, match="no room for its 4 bytes.*the checkpoints before it are untouched"):
        save_checkpoint(tmp_path, 2, {"a": {"b": torch.ones(1)}}, {}, extra=raises(full), keep=1)
    # What safetensors raises for the same, word for word.
    text = f"Error while serializing: I/O error: No space left on device (os error {number})"
    monkeypatch.setattr(checkpoint, "save_file", raises(SafetensorError(text)))
    with pytest.raises(UserError, match="no room for its 64 bytes"):
        save(tmp_path, 2, keep=1)
    assert names(tmp_path) == ["step-000001"] and check_whole(tmp_path) == 1


def test_an_error_of_the_caller_passes_through_and_leaves_nothing(tmp_path: Path):
    for error in (KeyboardInterrupt(), RuntimeError("no bank")):
        with pytest.raises(type(error)):
            save_checkpoint(tmp_path, 1, {}, {}, extra=raises(error))  # pyright: ignore[reportArgumentType]
        assert names(tmp_path) == []


def in_child(action: Callable[[], None]) -> int:
    """Run `action` in a forked process; 0 where it came to its end."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("again", [False, True], ids=["next step", "same step again"])
def test_killed_at_every_file_operation(
    again: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """The process ends, with nothing cleaned up, before its 1st, 2nd, ... file operation, until it gets through."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # the disk's own cache outlives a process
    died = 9

    def save_and_die(root: Path, operations: int) -> None:
        left = operations

        def count(event: str, arguments: tuple) -> None:
            nonlocal left
            if event == "open" or event.startswith(("os.", "shutil.")):
                left -= 1
                if left < 0:
                    os._exit(died)

        sys.addaudithook(count)
        save(root, 1 if again else 2, keep=1, note="new")

    for operations in range(1000):
        root = tmp_path / str(operations)
        save(root, 1, keep=1, note="old")
        ended = in_child(lambda root=root, operations=operations: save_and_die(root, operations))
        assert ended in (0, died)
        step = check_whole(root)
        assert capsys.readouterr().err == ""
        for name in names(root):  # whatever has the name of a step is one, the step about to be deleted too
            if not name.startswith("."):
                load_checkpoint(root / name)
        if ended == 0:
            break
        save(root, step + 1, keep=1)  # whatever is left does not stand in the way, and goes
        assert names(root) == [f"step-{step + 1:06d}"]
    else:
        pytest.fail("the save never came to its end")
    assert operations > 10 and check_whole(root) == (1 if again else 2)
    assert latest_good(root).state["note"] == "new"  # pyright: ignore[reportOptionalMemberAccess]


def test_killed_at_random_instants(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    instants = random.Random(0)
    save(tmp_path, 0)
    step = 0
    for _ in range(12):
        before = latest_checkpoint(tmp_path)
        child = os.fork()
        if child == 0:
            try:
                for following in range(step + 1, step + 10_000):
                    save(tmp_path, following, size=100_000)
            finally:
                os._exit(1)
        deadline = time.monotonic() + 20
        while latest_checkpoint(tmp_path) == before and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(instants.uniform(0.0, 0.05))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        newest = check_whole(tmp_path)
        assert newest > step, "the child saved nothing, or what it saved was lost"
        step = newest
    assert capsys.readouterr().err == ""


class Training:
    """Two groups with their own rates, a parameter that never gets a gradient, and data that follow from the step."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        self.unused = nn.Parameter(torch.randn(2))
        groups = [
            {"params": [self.unused, *self.model[0].parameters()], "lr": 1e-2},
            {"params": list(self.model[2].parameters()), "lr": 3e-3},
        ]
        self.optimizer = torch.optim.AdamW(groups, weight_decay=0.1)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
            self.optimizer.zero_grad()
            self.model(inputs).square().mean().backward()
            self.optimizer.step()

    def everything(self) -> dict[str, Tensor]:
        return {**self.model.state_dict(), "unused": self.unused, **optimizer_tensors(self.optimizer)}


def test_six_steps_are_three_and_three(tmp_path: Path):
    straight = Training()
    straight.train(1, 6)

    first = Training()
    first.train(1, 3)
    groups = {"model": first.model.state_dict(), "optimizer": optimizer_tensors(first.optimizer)}
    save_checkpoint(tmp_path, 3, groups, {})
    second = Training()
    second.train(1, 1)  # what is there before is replaced, not added to
    loaded = latest_good(tmp_path)
    assert loaded is not None
    second.model.load_state_dict(loaded.tensors["model"])
    restore_optimizer(second.optimizer, loaded.tensors["optimizer"])
    saved = {name: tensor.clone() for name, tensor in loaded.tensors["optimizer"].items()}
    second.train(loaded.step + 1, 6)

    expected, found = straight.everything(), second.everything()
    assert expected.keys() == found.keys() and "0.step" not in found and found["1.step"] == 6
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert [group["lr"] for group in second.optimizer.param_groups] == [1e-2, 3e-3]
    for name, tensor in saved.items():
        assert torch.equal(loaded.tensors["optimizer"][name], tensor), f"{name} was written to"


def test_an_optimizer_that_has_not_stepped_yet(tmp_path: Path):
    fresh = Training()
    saved = optimizer_tensors(fresh.optimizer)
    other = Training()
    other.train(1, 2)
    restore_optimizer(other.optimizer, saved)
    assert optimizer_tensors(other.optimizer).keys() == {"parameters"}


def test_another_optimizer_is_refused_in_one_sentence():
    trained = Training()
    trained.train(1, 1)
    saved = optimizer_tensors(trained.optimizer)

    def refuses(shapes: list[tuple[int, ...]], tensors: dict[str, Tensor], message: str) -> None:
        optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(shape)) for shape in shapes])
        with pytest.raises(UserError, match=message):
            restore_optimizer(optimizer, tensors)
        assert not optimizer.state

    right = [(2,), (7, 5), (7,), (3, 7), (3,)]
    refuses(right[:-1], saved, "has 5 parameters and this run trains 4")
    refuses(
        [(2,), (8, 5), *right[2:]], saved, r"of shape \(7, 5\) in .*32 for parameter 1, which has \(8, 5\)"
    )
    refuses(right, {}, "has 0 parameters and this run trains 5")
    momentum = {"parameters": torch.tensor(5), "0.momentum_buffer": torch.zeros(2)}
    refuses(right, momentum, "has momentum_buffer where AdamW's state is expected")
