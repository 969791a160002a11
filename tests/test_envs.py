"""Every environment keeps the protocol; each one's own rules follow."""

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lopd_fast.envs import lookup
from lopd_fast.envs.base import Environment, StepResult, Task, check_result, check_tasks
from lopd_fast.envs.lookup import LookupEnvironment
from lopd_fast.envs.reasoning_gym import (
    _ANSWERS_EVALUATED_BY_SCORER,
    _UNSAFE,
    ReasoningGymEnvironment,
    extract_answer,
)
from lopd_fast.envs.staff_database import StaffDatabase
from lopd_fast.errors import UserError

# What a model writes when it is wrong, and what breaks parsers of numbers, JSON, boards and expressions.
JUNK = [
    "",
    " ",
    "\0",
    "lookup:",
    "answer:",
    "lookup: nobody\nanswer: nothing",
    "<answer>",
    "</answer><answer>",
    "Answer: 1e999999999",
    "Answer: -1e-999999999",
    "Answer: nan",
    "Answer: " + "9" * 9000,
    "Answer: " + "[" * 5000,
    "Answer: " + "(" * 300 + "1" + ")" * 300,
    "Answer: {}",
    'Answer: {"a": [1, null]}',
    "Answer: __import__('os').getpid()",
    "<answer>" * 5000,
    "SELECT 1; DROP TABLE staff",
    "'; --",
    "\ud800",
    "x" * 100_000,
]


def reasoning_gym(dataset: str, **options: Any) -> Callable[[], ReasoningGymEnvironment]:
    def make() -> ReasoningGymEnvironment:
        pytest.importorskip("reasoning_gym")
        return ReasoningGymEnvironment(dataset, **options)

    return make


FACTORIES: dict[str, Callable[[], Any]] = {
    "lookup": LookupEnvironment,
    "staff_database": StaffDatabase,
    "chain_sum": reasoning_gym("chain_sum", max_terms=3),
    "coin_flip": reasoning_gym("coin_flip"),  # the scorer raises on 1e999 and never ends on 1e9999999
    "prime_factorization": reasoning_gym("prime_factorization"),  # the scorer raises on text
    "spiral_matrix": reasoning_gym("spiral_matrix", max_n=3),  # the scorer evaluates the answer
    "boxnet": reasoning_gym("boxnet"),  # has no answer of its own; the scorer reads JSON
}


@cache
def build(name: str) -> Any:
    return FACTORIES[name]()


@pytest.fixture(params=FACTORIES)
def environment(request: pytest.FixtureRequest) -> Environment:
    return build(request.param)


@pytest.fixture(scope="module", autouse=True)
def close_database() -> Iterator[None]:
    yield
    build("staff_database").close()


def test_same_seed_same_tasks(environment: Environment) -> None:
    for split in ("train", "heldout"):
        tasks = environment.tasks(split, 6, seed=5)
        assert len(tasks) == 6
        assert environment.tasks(split, 6, seed=5) == tasks
        assert [task.text for task in environment.tasks(split, 6, seed=6)] != [task.text for task in tasks]
        assert len({task.id for task in tasks}) == 6


def test_splits_share_nothing(environment: Environment) -> None:
    heldout = environment.tasks("heldout", 60, seed=1)
    train = environment.tasks("train", 60, seed=1) + environment.tasks("train", 60, seed=2)
    assert {task.text for task in heldout}.isdisjoint(task.text for task in train)
    assert {task.id for task in heldout}.isdisjoint(task.id for task in train)
    assert environment.tasks("train", 0, seed=1) == []


def test_unknown_split_is_named(environment: Environment) -> None:
    with pytest.raises(UserError, match="test"):
        environment.tasks("test", 1, seed=0)


def test_episode_opens_with_the_task(environment: Environment) -> None:
    for task in environment.tasks("train", 3, seed=0):
        messages = environment.start(task).messages
        assert messages[-1]["role"] == "user"
        assert all(message.keys() == {"role", "content"} for message in messages)
        assert {message["role"] for message in messages} <= {
            "system",
            "user",
            "assistant",
        }  # examples may be shown
        assert all(message["content"].strip() for message in messages)


def play(environment: Environment, task: Task, actions: list[str]) -> None:
    """Every step keeps the protocol, also one after the end, and the episode ends within `max_turns`."""
    episode = environment.start(task)
    done = False
    for turn, action in enumerate(actions, start=1):
        observation, reward, ended = episode.step(action)
        assert isinstance(observation, str) and isinstance(ended, bool)
        assert isinstance(reward, float) and 0.0 <= reward <= 1.0
        assert ended or not done
        assert ended or observation.strip(), "the model gets no hint of what happened"
        assert ended or turn < environment.max_turns
        done = ended
    assert done


def test_junk_is_an_observation_or_no_reward(environment: Environment) -> None:
    task = environment.tasks("train", 1, seed=0)[0]
    for action in JUNK:
        play(environment, task, [action] * environment.max_turns)


@pytest.mark.parametrize("name", FACTORIES)
@settings(max_examples=40)
@given(
    actions=st.lists(
        st.text() | st.sampled_from(JUNK) | st.text().map("answer: ".__add__), min_size=6, max_size=6
    )
)
def test_any_text_is_an_observation_or_no_reward(name: str, actions: list[str]) -> None:
    environment = build(name)
    play(environment, environment.tasks("heldout", 1, seed=0)[0], actions)


# --- lookup


def opened(seed: int = 0, **options: Any) -> tuple[Task, Any, str]:
    environment = LookupEnvironment(**options)
    task = environment.tasks("train", 1, seed)[0]
    value = task.data["records"][task.data["person"]][task.data["field"]]
    return task, environment.start(task), value


def test_lookup_then_answer_is_rewarded() -> None:
    task, episode, value = opened()
    observation, reward, done = episode.step(f"I will look.\nLookup:  {task.data['person'].upper()} \n")
    assert (reward, done) == (0.0, False)
    assert f"{task.data['field']} {value}" in observation
    assert episode.step(f"answer: {value.upper()}.") == ("", 1.0, True)
    assert episode.step(f"answer: {value}") == ("", 0.0, True)  # paid once


def test_right_answer_without_its_record_is_luck() -> None:
    task, episode, value = opened()
    assert episode.step(f"answer: {value}") == ("", 0.0, True)
    task, episode, value = opened()
    other = next(name for name in task.data["records"] if name != task.data["person"])
    episode.step(f"lookup: {other}")
    assert episode.step(f"answer: {value}") == ("", 0.0, True)


def test_wrong_answer_after_lookup() -> None:
    task, episode, value = opened()
    episode.step(f"lookup: {task.data['person']}")
    assert episode.step(f"answer: not {value}") == ("", 0.0, True)


def test_invented_observation_is_passed_over() -> None:
    """Only the first command of an action counts, so a model cannot answer before it has read."""
    task, episode, value = opened()
    observation, reward, done = episode.step(f"lookup: {task.data['person']}\nanswer: {value}")
    assert not done and value in observation


def test_bad_formats_cost_a_turn_each() -> None:
    task, episode, value = opened(max_turns=3)
    assert "lookup: FULL NAME" in episode.step(f"the {value} one").observation
    names = episode.step("lookup: No Body").observation
    assert all(name in names for name in task.data["records"])
    assert not any(values[task.data["field"]] in names for values in task.data["records"].values())
    assert episode.step(f"lookup: {task.data['person']}").done


def test_values_cannot_be_guessed_from_the_question() -> None:
    """The same question has different answers in different tasks, and the prompt does not hold the value."""
    answers: dict[str, set[str]] = {}
    for task in LookupEnvironment().tasks("heldout", 2000, seed=0):
        value = task.data["records"][task.data["person"]][task.data["field"]]
        answers.setdefault(task.text, set()).add(value)
        assert value not in task.text and value not in lookup.INSTRUCTION
    assert len(answers) == 20 * 4 * 3
    assert min(len(values) for values in answers.values()) > 1


def test_longer_list_begins_with_the_shorter() -> None:
    environment = LookupEnvironment(people=80)
    assert environment.tasks("train", 9, seed=1)[:4] == environment.tasks("train", 4, seed=1)
    assert len(environment.tasks("heldout", 1, seed=1)[0].data["records"]) == 80


@pytest.mark.parametrize("options", [{"people": 0}, {"people": 81}, {"max_turns": 1}])
def test_lookup_options_are_checked(options: dict[str, int]) -> None:
    with pytest.raises(UserError, match=next(iter(options))):
        LookupEnvironment(**options)


# --- reasoning_gym


@pytest.mark.parametrize(
    ("action", "answer"),
    [
        ("42", "42"),
        (" so it is\n42 ", "so it is\n42"),
        ("2 + 2 is 4.\nAnswer: 4", "4"),
        ("Answer: 3? No. Final answer: 4\n", "4"),
        ("**Answer:** 1 2\n3 4", "1 2\n3 4"),
        ("Answer: 5 <answer> 6 </answer>", "6"),
        ("<answer>1</answer> or <answer>2</answer>", "2"),
        ("<answer>7", "<answer>7"),
        ("Answer:", ""),
    ],
)
def test_extract_answer(action: str, answer: str) -> None:
    assert extract_answer(action) == answer


@pytest.mark.parametrize(
    "dataset", ["chain_sum", "coin_flip", "gsm_symbolic", "countdown", "spiral_matrix", "n_queens"]
)
def test_own_answer_has_reward_1_and_another_less(dataset: str) -> None:
    pytest.importorskip("reasoning_gym")
    environment = ReasoningGymEnvironment(dataset)
    for task in environment.tasks("heldout", 2, seed=0):
        right = task.data["entry"]["answer"]
        assert environment.start(task).step(f"I think.\nAnswer: {right}") == ("", 1.0, True)
        assert environment.start(task).step(f"<answer>{right}</answer>").reward == 1.0
        assert environment.start(task).step("Answer: 0 0").reward < 0.1


@pytest.mark.parametrize("dataset", sorted(_ANSWERS_EVALUATED_BY_SCORER))
def test_model_text_is_not_run(dataset: str, tmp_path: Any) -> None:
    pytest.importorskip("reasoning_gym")
    environment = ReasoningGymEnvironment(dataset)
    task = environment.tasks("train", 1, seed=0)[0]
    trace = tmp_path / "run"
    for code in (
        f"open({str(trace)!r}, 'w')",
        f"[open({str(trace)!r}, 'w')]",
        f"__import__('pathlib').Path({str(trace)!r}).touch()",
        f"(lambda: open({str(trace)!r}, 'w'))()",
    ):
        assert environment.start(task).step(f"<answer>{code}</answer>").reward == 0.0
        assert not trace.exists()
    assert environment.start(task).step("Answer: 9**9**9**9").reward == 0.0  # would never end
    for junk in [
        *JUNK,
        "Answer: 0.1" + "0" * 9000,
        "Answer: 1/0",
        "Answer: [[]]",
        "Answer: ''",
        "Answer: [][",
    ]:
        assert 0.0 <= environment.start(task).step(junk).reward < 0.1


def test_every_scorer_that_evaluates_is_known() -> None:
    """A newer reasoning_gym may bring more of them: this names the dataset to look at."""
    factory = pytest.importorskip("reasoning_gym.factory")
    found = {
        name
        for name, (dataset, _) in factory.DATASETS.items()
        if any(
            call in inspect.getsource(dataset.score_answer)
            for call in (
                "eval(answer",
                "exec(",
                "parse_expr(answer",
                "sympify(",
                "parse_latex(",
                "pickle",
                "compile(",
            )
        )
    }
    assert found == _UNSAFE | _ANSWERS_EVALUATED_BY_SCORER.keys()


@pytest.mark.parametrize("dataset", sorted(_UNSAFE))
def test_unsafe_scorers_are_refused(dataset: str) -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(UserError, match="running it as Python code"):
        ReasoningGymEnvironment(dataset)


def test_tasks_are_the_same_in_another_process() -> None:
    pytest.importorskip("reasoning_gym")
    code = (
        "import json; from lopd_fast.envs.reasoning_gym import ReasoningGymEnvironment as E;"
        "print(json.dumps([t.text for t in E('letter_counting').tasks('train', 5, 1)]))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    shown = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    here = ReasoningGymEnvironment("letter_counting").tasks("train", 5, 1)
    assert json.loads(shown.stdout.splitlines()[-1]) == [task.text for task in here]


def test_datasets_that_follow_the_hash_seed_need_it_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("reasoning_gym")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(UserError, match="set PYTHONHASHSEED=0"):
        ReasoningGymEnvironment("ransom_note")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert ReasoningGymEnvironment("ransom_note").tasks("train", 1, 0)


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        ("chain_sums", {}, "nearest names are chain_sum"),
        ("composite", {}, "mixes other datasets"),
        ("chain_sum", {"seed": 1}, "cannot take the option 'seed'"),
        ("chain_sum", {"size": 1}, "cannot take the option 'size'"),
        ("chain_sum", {"terms": 1}, "unexpected keyword argument 'terms'"),
        ("chain_sum", {"min_terms": 99}, "max_terms must be >= min_terms"),
    ],
)
def test_wrong_choices_are_named(dataset: str, options: dict[str, Any], message: str) -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(UserError, match=message):
        ReasoningGymEnvironment(dataset, **options)


def test_more_tasks_than_questions() -> None:
    pytest.importorskip("reasoning_gym")
    small = ReasoningGymEnvironment("chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    with pytest.raises(UserError, match="different heldout questions with these options, not 500"):
        small.tasks("heldout", 500, seed=0)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r"pip install lopd-fast\[envs\]"):
        ReasoningGymEnvironment("chain_sum")


# --- what an environment must not give ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        ([], "mine has no tasks for the split train"),
        ([Task("a", "x"), Task("b", " \n")], "Task 'b' of the environment mine has no text"),
        ([Task("a", "x", "", {"seen": {1, 2}})], "Task.data of the environment mine must be plain JSON"),
    ],
)
def test_tasks_that_cannot_be_used(tasks: list[Task], said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_tasks(tasks, "train", "mine")


@pytest.mark.parametrize("reward", [5.0, -0.1, float("nan"), float("inf")])
def test_a_reward_is_a_number_from_0_to_1(reward: float) -> None:
    with pytest.raises(UserError, match=r"task 'a' gave the reward .*, which must be in \[0, 1\]"):
        check_result(StepResult("", reward, True), Task("a", "x"))
    check_result(StepResult("", reward, False), Task("a", "x"))  # counts when done alone
    with pytest.raises(UserError, match="task 'a' returned a tuple, not a StepResult"):
        check_result(("", 1.0, True), Task("a", "x"))
