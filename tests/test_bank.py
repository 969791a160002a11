"""The experience bank against brute force, and what experiences are read from."""

import json
from pathlib import Path

import numpy as np
import pytest
from banks import TableEncoder, document, entry, ids

from lopd_fast.bank import Experience, ExperienceBank, linearise, read_experiences
from lopd_fast.errors import UserError

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
