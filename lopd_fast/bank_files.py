"""An experience bank on disk: one folder of JSON, JSON lines and safetensors; no pickle is written or read.

    bank.json                            counts, encoder, and the generation of the two files below
    experiences-<generation>.jsonl       one experience a line
    embeddings-<generation>.safetensors  "embeddings" (N, D) fp32 in the same order, "probe" (D,) fp32

bank.json is written last, by a rename, and the files of the generation before are deleted after that: a save that is
killed at any instant leaves the bank that was there. The probe is the encoder's vector for a fixed text, by which
`ExperienceBank.load` tells another encoder of the same width. The index is not stored: a flat one is its vectors.
"""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lopd_fast.errors import UserError
from lopd_fast.experience import Experience, read_experiences
from lopd_fast.file_mode import take_mode

HEADER = "bank.json"
_FORMAT = 1
_PICKLE_SUFFIXES = {".pkl", ".pickle", ".pck", ".pt", ".pth", ".joblib", ".dill"}


class StoredBank(NamedTuple):
    """A bank as it is on disk, no encoder opened.

    header: count, dim, min_reward, encoder {name, query_prompt, document_prompt}; format and generation once saved.
    """

    header: dict[str, Any]
    experiences: list[Experience]
    embeddings: np.ndarray  # (N, D) fp32, unit length
    probe: np.ndarray  # (D,) fp32, unit length


def write_bank(folder: str | Path, stored: StoredBank) -> None:
    """Write a bank to `folder`, made if need be; the header's format and generation are filled in here."""
    from safetensors.numpy import save_file

    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: give a folder to save the bank in.")
    folder.mkdir(parents=True, exist_ok=True)
    generation = _read_header(folder)["generation"] + 1 if (folder / HEADER).exists() else 1
    header = {**stored.header, "format": _FORMAT, "generation": generation}
    entries_path, embeddings_path = _data_files(folder, generation)
    with entries_path.open("w", encoding="utf-8") as file:
        for experience in stored.experiences:
            file.write(json.dumps(asdict(experience), ensure_ascii=False) + "\n")
    save_file({"embeddings": stored.embeddings, "probe": stored.probe}, embeddings_path)
    take_mode([embeddings_path], entries_path)
    temporary = folder / f"{HEADER}.tmp"
    temporary.write_text(json.dumps(header, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    for path in (entries_path, embeddings_path, temporary):
        _sync(path)
    os.replace(temporary, folder / HEADER)
    _sync(folder)
    for path in [*folder.glob("experiences-*.jsonl"), *folder.glob("embeddings-*.safetensors")]:
        if path not in (entries_path, embeddings_path):
            path.unlink()


def read_bank(folder: str | Path) -> StoredBank:
    """Read and check a bank folder without opening an encoder. Raises UserError with one sentence on what is wrong."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"there is no bank at {folder}: build one with `lopd-fast bank build`.")
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix.lower() in _PICKLE_SUFFIXES)
    if pickles:
        raise UserError(f"{folder} holds {pickles[0]}, a pickle, which no bank has: it is not opened.")
    header = _read_header(folder)
    entries_path, embeddings_path = _data_files(folder, header["generation"])
    try:
        experiences = list(read_experiences(entries_path))
        tensors = load_file(embeddings_path)
        embeddings, probe = tensors["embeddings"], tensors["probe"]
    except (OSError, SafetensorError, KeyError) as error:
        raise UserError(f"{embeddings_path} cannot be read as the embeddings of a bank ({error}).") from error
    count, dim = header["count"], header["dim"]
    if embeddings.shape != (count, dim) or probe.shape != (dim,) or len(experiences) != count:
        raise UserError(
            f"the bank in {folder} is damaged: bank.json says {count} x {dim}, {entries_path.name} has "
            f"{len(experiences)} experiences and {embeddings_path.name} has {embeddings.shape}: build it again."
        )
    if len({experience.id for experience in experiences}) != count:
        raise UserError(
            f"the bank in {folder} is damaged: {entries_path.name} gives one id twice: build it again."
        )
    if not np.allclose(np.linalg.norm(embeddings, axis=1), 1.0, atol=1e-3):
        raise UserError(
            f"the bank in {folder} is damaged: not all of its embeddings have unit length: build it again."
        )
    return StoredBank(header, experiences, embeddings, probe)


def _read_header(folder: Path) -> dict[str, Any]:
    path = folder / HEADER
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
        for name, kind in (("generation", int), ("count", int), ("dim", int), ("min_reward", (int, float))):
            if not isinstance(header[name], kind):
                raise TypeError(name)
        for name in ("name", "query_prompt", "document_prompt"):
            if not isinstance(header["encoder"][name], str):
                raise TypeError(name)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not the header of an experience bank ({error}).") from error
    if header.get("format") != _FORMAT:
        raise UserError(f"{path} has format {header.get('format')!r}; this version reads format {_FORMAT}.")
    return header


def _data_files(folder: Path, generation: int) -> tuple[Path, Path]:
    return folder / f"experiences-{generation}.jsonl", folder / f"embeddings-{generation}.safetensors"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
