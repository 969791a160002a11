"""Checkpoints of a run: safetensors and JSON, no pickle, and whole at whatever instant the process dies.

    root/step-000010/
        <group>.safetensors   one for each group of tensors
        state.json            format, step, tensors per group, bytes per file, and the caller's own state
        ...                   what `extra` wrote, a bank for example

A step is written into a hidden sibling, flushed to the disk and then renamed, so a folder by the name of a step is
complete. A step that is saved again moves the folder it replaces to `step-000010.old` until the new one is in place.
"""

import errno
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lopd_fast.errors import UserError
from lopd_fast.file_mode import take_mode
from lopd_fast.optimizer_state import optimizer_tensors, restore_optimizer

__all__ = [
    "Checkpoint",
    "latest_checkpoint",
    "latest_good",
    "load_checkpoint",
    "optimizer_tensors",
    "restore_optimizer",
    "save_checkpoint",
]

STATE = "state.json"
_FORMAT = 1
_STEP_FOLDER = re.compile(r"step-(\d{6,})(\.old)?")
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True)
class Checkpoint:
    """One loaded step; tensors are on the CPU, by group and name. `path` is where `extra` left its files."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]
    path: Path


def save_checkpoint(
    root: str | Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    *,
    extra: Callable[[Path], None] | None = None,
    keep: int = 2,
) -> Path:
    """Write `root/step-<step>` and return it; afterwards the newest `keep` steps are left.

    tensors: group -> name -> tensor of any shape, dtype and device; tensors that share memory are written in full.
    state: what JSON can hold. extra: called with the folder, to write more files into it.
    Checkpoints of later steps belong to a run that was abandoned when this one went back to an earlier step, and go.

    Raises:
        UserError: the disk is full or cannot be written to; earlier checkpoints are as they were.
    """
    if step < 0 or keep < 1:
        raise ValueError(f"step is {step} and keep is {keep}: step must be at least 0 and keep at least 1.")
    root = Path(root)
    name = f"step-{step:06d}"
    partial = root / f".{name}.partial"
    document = {
        "format": _FORMAT,
        "step": step,
        "tensors": {group: len(entries) for group, entries in tensors.items()},
        "state": dict(state),
    }
    json.dumps(document)  # what JSON cannot hold is refused before a byte is written
    needed = sum(tensor.nbytes for entries in tensors.values() for tensor in entries.values())
    try:
        root.mkdir(parents=True, exist_ok=True)
        for stale in root.glob(".step-*"):
            shutil.rmtree(stale)
        if shutil.disk_usage(root).free < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        _write(partial, tensors, document, extra)
        _put_in_place(partial, root / name)
        _rotate(root, step, keep)
    except (OSError, SafetensorError) as error:
        number = _errno_of(error)
        if number is None:
            raise
        reason = (
            f"the disk has no room for its {needed:,} bytes" if number in _DISK_FULL else os.strerror(number)
        )
        raise UserError(
            f"Step {step} cannot be saved in {root}: {reason}; the checkpoints before it are untouched."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return root / name


def latest_checkpoint(root: str | Path) -> Path | None:
    """The newest checkpoint in `root` whose files are all there in full, or None. Nothing but sizes is read."""
    for folder in _step_folders(Path(root)):
        if _is_whole(folder):
            return folder
    return None


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Read one step's folder. Raises UserError, one sentence, where it is missing or damaged."""
    path = Path(path)
    document = _read_state(path)
    tensors = {}
    for group, count in document["tensors"].items():
        file = path / f"{group}.safetensors"
        try:
            tensors[group] = load_file(file)
        except (OSError, SafetensorError) as error:
            raise _damaged(path, f"{file.name} cannot be read, {error}") from error
        if len(tensors[group]) != count:
            raise _damaged(path, f"{file.name} has {len(tensors[group])} tensors where {count} were saved")
    return Checkpoint(document["step"], tensors, document["state"], path)


def latest_good(root: str | Path) -> Checkpoint | None:
    """The newest step in `root` that loads, None where none was ever saved; each damaged one is named on stderr.

    Raises:
        UserError: there are checkpoints and all are damaged; starting afresh is for the user to say.
    """
    folders = _step_folders(Path(root))
    for folder in folders:
        try:
            return load_checkpoint(folder)
        except UserError as error:
            print(f"warning: {error}", file=sys.stderr)
    if folders:
        raise UserError(
            f"None of the {len(folders)} checkpoints in {root} can be read: delete them to start afresh."
        )
    return None


def _write(
    folder: Path,
    tensors: Mapping[str, Mapping[str, Tensor]],
    document: dict[str, Any],
    extra: Callable[[Path], None] | None,
) -> None:
    folder.mkdir()
    for group, entries in tensors.items():
        save_file(_unshared(entries), folder / f"{group}.safetensors")
    if extra is not None:
        extra(folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
    (folder / STATE).write_text(json.dumps({**document, "files": sizes}) + "\n", encoding="utf-8")
    take_mode(folder.glob("*.safetensors"), folder / STATE)
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _unshared(entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors on the CPU, contiguous, no two in the same memory: safetensors refuses tied ones."""
    seen: set[int] = set()
    own = {}
    for name, tensor in entries.items():
        tensor = tensor.detach().cpu().contiguous()
        memory = tensor.untyped_storage().data_ptr()
        own[name] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    return own


def _put_in_place(partial: Path, final: Path) -> None:
    """Rename `partial` to `final`. A good folder by that name stays loadable, as .old, until that is done."""
    if _is_whole(final):
        old = final.with_name(f"{final.name}.old")
        _discard(old)
        os.rename(final, old)
    else:
        _discard(final)
    os.rename(partial, final)
    _sync(final.parent)


def _rotate(root: Path, step: int, keep: int) -> None:
    kept: set[int] = set()
    for folder in _step_folders(root):
        number = _step_of(folder)
        if number <= step and number not in kept and len(kept) < keep and _is_whole(folder):
            kept.add(number)
        else:
            _discard(folder)


def _discard(folder: Path) -> None:
    """Delete a folder; renamed first, so that no half of it is ever found by the name of a step."""
    if folder.exists():
        hidden = folder.with_name(f".{folder.name}.discarded")
        os.rename(folder, hidden)
        shutil.rmtree(hidden)


def _step_folders(root: Path) -> list[Path]:
    """Folders by the name of a step, the newest first; within one step the .old one last."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if path.is_dir() and _STEP_FOLDER.fullmatch(path.name)]
    return sorted(found, key=lambda path: (-_step_of(path), path.suffix))


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-").removesuffix(".old"))


def _is_whole(folder: Path) -> bool:
    try:
        _read_state(folder)
    except UserError:
        return False
    return True


def _read_state(folder: Path) -> dict[str, Any]:
    """state.json, with every file that it lists there in full size."""
    if not folder.is_dir():
        raise UserError(f"There is no checkpoint at {folder}.")
    try:
        document = json.loads((folder / STATE).read_text(encoding="utf-8"))
        if document["format"] != _FORMAT:
            raise UserError(
                f"The checkpoint {folder} has format {document['format']!r}; this version reads format {_FORMAT}."
            )
        kinds = {"step": int, "tensors": dict, "files": dict, "state": dict}
        wrong = [name for name, kind in kinds.items() if not isinstance(document[name], kind)]
        if wrong:
            raise TypeError(f"'{wrong[0]}' is a {type(document[wrong[0]]).__name__}")
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(folder, f"{STATE} cannot be read, {error}") from error
    for name, size in document["files"].items():
        file = folder / name
        if not file.is_file():
            raise _damaged(folder, f"{name} is missing")
        if file.stat().st_size != size:
            raise _damaged(folder, f"{name} has {file.stat().st_size:,} bytes where {size:,} were saved")
    return document


def _damaged(folder: Path, what: str) -> UserError:
    return UserError(f"The checkpoint {folder} is damaged ({what}): resume from an earlier one.")


def _errno_of(error: Exception) -> int | None:
    """The system's error number; safetensors has it in its text alone."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"os error (\d+)", str(error))
    return int(found[1]) if found else None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
