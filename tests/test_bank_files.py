"""The bank's files, and what is damaged in them."""

import pickle
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from banks import Bomb, TableEncoder, edit_header, entry, ids
from safetensors.numpy import load_file, save_file

from lopd_fast import bank_files
from lopd_fast.bank import ExperienceBank
from lopd_fast.bank_files import write_bank
from lopd_fast.errors import UserError
from lopd_fast.flat_index import FaissIndex, NumpyIndex


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A bank of three on disk, built with TableEncoder(dim=4)."""
    bank = ExperienceBank(TableEncoder(dim=4), min_reward=0.5)
    bank.add([entry("a", group="g"), entry("b", quality=0.3), entry("c\u2028\n\x85 \"é😀'", reward=0.75)])
    bank.save(tmp_path / "bank")
    return tmp_path / "bank"


def load(folder: Path) -> ExperienceBank:
    return ExperienceBank.load(folder, TableEncoder(dim=4))


def test_saved_bank_is_the_same_bank(saved: Path):
    bank = load(saved)
    assert bank.experiences[2] == entry("c\u2028\n\x85 \"é😀'", reward=0.75)
    assert bank.experiences[1].quality == 0.3 and bank.min_reward == 0.5
    original = ExperienceBank(TableEncoder(dim=4), min_reward=0.5)
    original.add(bank.experiences)
    queries = ["x", "y", "z"]
    assert bank.search(queries) == original.search(queries)  # bit for bit: scores are compared with ==
    assert bank.add([entry("b"), entry("d")]) == (1, 1, 0)  # and it goes on growing
    bank.save(saved)
    assert load(saved).search(queries) == bank.search(queries)
    assert sorted(path.name for path in saved.iterdir()) == [
        "bank.json",
        "embeddings-2.safetensors",
        "experiences-2.jsonl",
    ]


@pytest.mark.parametrize("kind", [FaissIndex, NumpyIndex])
def test_a_snapshot_is_the_bank_of_its_moment(kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lopd_fast.bank.flat_index", kind)
    bank = ExperienceBank(TableEncoder(dim=4))
    bank.add([entry("a", quality=0.1), entry("b")])
    snapshot, before = bank.snapshot(), list(bank.experiences)
    bank.add([entry("a", quality=0.9), *(entry(f"c{number}") for number in range(20))])
    write_bank(tmp_path / "bank", snapshot)
    assert load(tmp_path / "bank").experiences == before


@pytest.mark.parametrize("step", ["save_file", "fsync", "replace", "unlink"])
def test_killed_save_leaves_a_whole_bank(saved: Path, monkeypatch: pytest.MonkeyPatch, step: str):
    bank = load(saved)
    bank.add([entry("d")])

    class Killed(BaseException):
        pass

    def die(*arguments, **keywords):
        raise Killed

    owner = {"save_file": "safetensors.numpy.save_file", "unlink": "pathlib.Path.unlink"}
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(owner.get(step, f"os.{step}"), die)
        bank.save(saved)
    assert len(load(saved)) == (4 if step == "unlink" else 3)
    bank.save(saved)
    assert len(load(saved)) == 4 and len(list(saved.iterdir())) == 3  # nothing of the killed save is left


@pytest.mark.parametrize(
    "name", ["entries.pkl", "index.PT", "embeddings-1.safetensors", "experiences-1.jsonl"]
)
def test_pickle_in_a_bank_folder_is_never_opened(saved: Path, tmp_path: Path, name: str):
    (saved / name).write_bytes(pickle.dumps(Bomb(tmp_path / "mark")))
    with pytest.raises(UserError):
        load(saved)
    assert not (tmp_path / "mark").exists()
    pickle.loads((saved / name).read_bytes())
    assert (tmp_path / "mark").exists()  # the bomb is live


def drop_a_line(folder: Path) -> None:
    path = folder / "experiences-1.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def drop_a_row(folder: Path) -> None:
    path = folder / "embeddings-1.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "embeddings": tensors["embeddings"][:-1]}, path)


def repeat_a_line(folder: Path) -> None:
    path = folder / "experiences-1.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], lines[0], lines[2]]))


def scale_rows(folder: Path) -> None:
    path = folder / "embeddings-1.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "embeddings": tensors["embeddings"] * 2}, path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop_a_line, "says 3 x 4, experiences-1.jsonl has 2 experiences"),
        (drop_a_row, r"embeddings-1.safetensors has \(2, 4\)"),
        (repeat_a_line, "experiences-1.jsonl gives one id twice"),
        (scale_rows, "not all of its embeddings have unit length"),
        (edit_header(count=4), "says 4 x 4"),
        (edit_header(dim=5), "says 3 x 5"),
        (edit_header(format=9), "format 9"),
        (edit_header(encoder=[]), "not the header of an experience bank"),
        (lambda folder: (folder / "bank.json").write_text("{"), "not the header of an experience bank"),
        (lambda folder: (folder / "bank.json").unlink(), "not the header of an experience bank"),
        (lambda folder: (folder / "embeddings-1.safetensors").unlink(), "cannot be read as the embeddings"),
        (lambda folder: (folder / "experiences-1.jsonl").unlink(), "is not a file"),
    ],
)
def test_damaged_banks_are_one_sentence(saved: Path, damage: Callable[[Path], None], message: str):
    damage(saved)
    with pytest.raises(UserError, match=message) as caught:
        load(saved)
    assert "\n" not in str(caught.value)


def test_missing_folder_and_file_in_its_place_are_named(tmp_path: Path):
    with pytest.raises(UserError, match="no bank at .*nowhere"):
        load(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file: give a folder"):
        ExperienceBank(TableEncoder()).save(tmp_path / "file")


def test_another_encoder_than_the_one_of_the_bank_is_refused(saved: Path):
    for other in (TableEncoder(dim=4, seed=1), TableEncoder(dim=5)):
        with pytest.raises(UserError, match=r"built with the encoder table \(dim 4, .*use that encoder"):
            ExperienceBank.load(saved, other)
    prompted = TableEncoder(dim=4)
    prompted.document_prompt = "passage: "
    with pytest.raises(UserError, match="document prompt 'passage: '"):
        ExperienceBank.load(saved, prompted)
    moved = TableEncoder(dim=4)  # the same weights under another name, asked with another query prompt
    moved.name, moved.query_prompt = "elsewhere", "query: "
    assert len(ExperienceBank.load(saved, moved)) == 3


def test_fifty_thousand_entries_load_and_answer(tmp_path: Path):
    count, dim = 50_000, 384
    vectors = np.random.default_rng(0).standard_normal((count, dim)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    encoder = TableEncoder({"query": vectors[31_234].tolist()}, dim=dim)
    header = {
        "count": count,
        "dim": dim,
        "min_reward": 1.0,
        "encoder": {"name": "table", "query_prompt": "", "document_prompt": ""},
    }
    entries = [entry(f"task {number}", id=str(number), group=str(number % 7)) for number in range(count)]
    probe = ExperienceBank(encoder)._probe()
    bank_files.write_bank(tmp_path, bank_files.StoredBank(header, entries, vectors, probe))
    start = time.perf_counter()
    bank = ExperienceBank.load(tmp_path, encoder)
    loaded = time.perf_counter()
    unrestricted, restricted = bank.search(["query", "query"], groups=[None, {"1", "2"}])
    print(
        f"\n{count} x {dim}: loaded in {loaded - start:.2f} s, searched in {time.perf_counter() - loaded:.3f} s"
    )
    exact = vectors.astype(np.float64) @ vectors[31_234].astype(np.float64)
    assert ids(unrestricted) == [str(row) for row in np.argsort(-exact)[:3]]
    assert unrestricted[0].experience.id == "31234" and unrestricted[0].score == pytest.approx(1.0, abs=1e-5)
    exact[~np.isin(np.arange(count) % 7, [1, 2])] = -np.inf
    assert ids(restricted) == [str(row) for row in np.argsort(-exact)[:3]]
