"""The procedural datasets of the optional package reasoning_gym as single-turn environments.

The splits are a partition of the questions: a hash of the question's text says which split it belongs to, so
that train and heldout share no question, whatever the seeds and counts.

The scorers of some datasets pass the answer, which a model wrote, to Python's `eval`. Here such a dataset is
either refused or sees only answers whose characters cannot spell a name, a call or a power.
"""

import difflib
import hashlib
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lopd_fast.envs.base import Message, StepResult, Task
from lopd_fast.errors import UserError

INSTRUCTION = "Solve the task. Give the final answer alone after 'Answer:' at the end of your reply."

_CHUNK = 500  # questions from one dataset seed
_HELDOUT_BYTES = 64  # of 256 values of the hash's first byte: one question in four is heldout
_ANSWER_CHARACTERS = 2_000  # several scorers take seconds for the endless repetitions that models fall into

_ARITHMETIC = r"(?:[0-9\s()+/.-]|\*(?!\*))*"
_ANSWERS_EVALUATED_BY_SCORER = {
    "binary_matrix": r"[0-9\s,\[\]]*",
    "countdown": _ARITHMETIC,
    "n_queens": r"[Q_\s,'\"\[\]]*",
    "puzzle24": _ARITHMETIC,
    "spiral_matrix": r"[0-9\s,\[\]-]*",
    "string_insertion": r"[A-E\s,'\"\[\]]*",
}
_UNSAFE = {"intermediate_integration", "polynomial_multiplication", "simple_integration"}
# They iterate over sets of strings, whose order is another one in each process.
_HASH_ORDERED = {"isomorphic_strings", "list_functions", "ransom_note", "word_ladder"}
# Fraction("1e999999999") is an integer of a gigabyte.
_HUGE_EXPONENT = re.compile(r"[eE][+-]?[0-9]{4}")


class ReasoningGymEnvironment:
    """One dataset of reasoning_gym, as `lopd_fast.envs.base.Environment`.

    dataset          the name in reasoning_gym, such as "basic_arithmetic"
    dataset_options  fields of that dataset's configuration, such as max_terms=4; not `seed` or `size`

    Reward is the dataset's own score of `extract_answer(action)`, clipped to [0, 1]; several datasets give part of
    it for a partly right answer. An answer that the scorer cannot take has reward 0, and so has one of more than
    2,000 characters that is also more than twice as long as the dataset's own.

    Raises UserError for a missing package, an unknown or unsupported dataset, and options that it refuses.
    """

    max_turns = 1

    def __init__(self, dataset: str, **dataset_options: Any) -> None:
        self.name = f"reasoning_gym/{dataset}"
        self._dataset_name = dataset
        self._options = dataset_options
        self._scorer = self._create_dataset(seed=0)

    def tasks(self, split: str, count: int, seed: int) -> list[Task]:
        """`count` different questions of `split`; UserError where the dataset does not have as many."""
        if split not in ("train", "heldout"):
            raise UserError(f"split must be 'train' or 'heldout', not {split!r}")
        found: dict[str, Task] = {}
        candidates = itertools.islice(self._entries(seed), 20 * count + 200)
        while len(found) < count and (entry := next(candidates, None)) is not None:
            digest = hashlib.sha256(entry["question"].encode())
            if (digest.digest()[0] < _HELDOUT_BYTES) == (split == "heldout"):
                key = digest.hexdigest()[:16]
                found.setdefault(
                    key, Task(f"{self.name}/{key}", entry["question"], self._dataset_name, {"entry": entry})
                )
        if len(found) < count:
            raise UserError(
                f"{self.name} has about {len(found)} different {split} questions with these options, not {count}; "
                "ask for fewer or widen the options"
            )
        return list(found.values())

    def start(self, task: Task) -> "_Episode":
        return _Episode(self, task)

    def score(self, answer: str, entry: Mapping[str, Any]) -> float:
        """Reward of an extracted answer, in [0, 1]."""
        longest = max(_ANSWER_CHARACTERS, 2 * len(entry["answer"] or ""))
        allowed = _ANSWERS_EVALUATED_BY_SCORER.get(self._dataset_name)
        if len(answer) > longest or _HUGE_EXPONENT.search(answer):
            return 0.0
        if allowed is not None and not re.fullmatch(allowed, answer):
            return 0.0
        try:
            score = float(self._scorer.score_answer(answer, entry))
        except Exception:  # a hundred scorers, each with its own way to refuse what it cannot parse
            return 0.0
        return min(max(score, 0.0), 1.0) if score == score else 0.0

    def _entries(self, seed: int) -> Iterator[dict[str, Any]]:
        # Item i of a dataset is drawn from `seed + i`, so neighbouring seeds share items: hash the seed apart.
        for chunk in itertools.count():
            digest = hashlib.sha256(f"{seed}:{chunk}".encode()).digest()
            dataset = self._create_dataset(int.from_bytes(digest[:4], "big"))
            for index in range(_CHUNK):
                yield dataset[index]

    def _create_dataset(self, seed: int) -> Any:
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise UserError(
                f"{self.name} needs reasoning_gym ({error}); run `pip install lopd-fast[envs]`"
            ) from error
        name = self._dataset_name
        if name not in DATASETS:
            near = difflib.get_close_matches(name, DATASETS, n=3, cutoff=0.4) or sorted(DATASETS)[:3]
            raise UserError(f"reasoning_gym has no dataset {name!r}; the nearest names are {', '.join(near)}")
        if name == "composite":
            raise UserError("reasoning_gym's 'composite' only mixes other datasets; name one of those")
        if name in _UNSAFE:
            raise UserError(f"{name!r} scores an answer by running it as Python code; choose another dataset")
        if name in _HASH_ORDERED and not os.environ.get("PYTHONHASHSEED", "").isdigit():
            raise UserError(
                f"the questions of {name!r} depend on Python's hash seed; set PYTHONHASHSEED=0 before starting Python"
            )
        if reserved := {"seed", "size"} & self._options.keys():
            raise UserError(f"{name!r} cannot take the option {min(reserved)!r}: tasks() sets it")
        try:
            return reasoning_gym.create_dataset(name, seed=seed, size=_CHUNK, **self._options)
        except (TypeError, ValueError, AssertionError) as error:
            raise UserError(
                f"reasoning_gym refuses the options {self._options} of {name!r}: {error}"
            ) from error


class _Episode:
    """One question, one reply."""

    def __init__(self, environment: ReasoningGymEnvironment, task: Task) -> None:
        self.messages: Sequence[Message] = [
            {"role": "system", "content": INSTRUCTION},
            {"role": "user", "content": task.text},
        ]
        self._environment = environment
        self._entry = task.data["entry"]

    def step(self, action: str) -> StepResult:
        return StepResult("", self._environment.score(extract_answer(action), self._entry), True)


def extract_answer(action: str) -> str:
    """The answer in a reply: inside the last <answer> tags, else after the last "Answer:", else all of it."""
    end = action.rfind("</answer>")
    start = action.rfind("<answer>", 0, max(end, 0))
    if start >= 0:
        return action[start + len("<answer>") : end].strip()
    return re.split(r"answer\s*:\**", action, flags=re.IGNORECASE)[-1].strip()
