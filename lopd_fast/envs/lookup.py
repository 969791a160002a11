"""A small environment with a tool: the answer stands in a record that must be looked up first.

The registry of each task is drawn at random, so nothing but the tool's result holds the answer. It is the example
of an environment of several turns, and what the tests of rollouts and training run on.
"""

import random
import re
from collections.abc import Sequence

from lopd_fast.envs.base import Message, StepResult, Task
from lopd_fast.errors import UserError

INSTRUCTION = (
    "You answer questions about the people of a registry. Reply with one line, either\n"
    "lookup: FULL NAME\n"
    "to read a person's record, or\n"
    "answer: VALUE\n"
    "to give the final answer."
)
_FORMAT_HINT = "Not understood. Write one line, 'lookup: FULL NAME' or 'answer: VALUE'."

_FIRST_NAMES = (
    "Ada Bela Carl Dana Emil Fay Gus Hana Ivo June Kai Lena Milo Nora Otto Pia Quin Rosa Sam Tess".split()
)
# A surname belongs to one split, so no question is in both.
_SURNAMES = {
    "train": "Abel Birch Cole Drake Egan Fox Grant Holt Ives Jarvis Kerr Lund".split(),
    "heldout": "Marsh Nolan Ortiz Pratt".split(),
}
_FIELDS = {
    "badge colour": "amber coral ivory jade lilac ochre olive scarlet teal violet".split(),
    "home city": "Accra Bergen Cusco Dakar Eilat Galway Hobart Izmir Kyoto Quito".split(),
    "locker number": [str(number) for number in range(100, 1000)],
}
_COMMAND = re.compile(r"^[ \t]*(lookup|answer)[ \t]*:[ \t]*(\S.*)$", re.IGNORECASE | re.MULTILINE)


class LookupEnvironment:
    """Questions about one field of one person, as `lopd_fast.envs.base.Environment`.

    The first line of an action that is `lookup: NAME` or `answer: VALUE` counts; anything else in the action is
    passed over, and an action without such a line costs a turn. An answer ends the episode. Reward is 1 for the right
    value if the person's record was read before, else 0: a lucky guess is worth nothing. `max_turns` actions
    without an answer end the episode with reward 0.

    people      size of each task's registry, 1 to 80
    max_turns   actions of one episode, at least 2
    """

    name = "lookup"

    def __init__(self, *, people: int = 5, max_turns: int = 4) -> None:
        if not 1 <= people <= 80:
            raise UserError(f"people must be between 1 and 80, not {people}")
        if max_turns < 2:
            raise UserError(f"max_turns must be at least 2 (a lookup and an answer), not {max_turns}")
        self.people = people
        self.max_turns = max_turns

    def tasks(self, split: str, count: int, seed: int) -> list[Task]:
        """`count` tasks; task i depends on (split, seed, i) alone, so a longer list begins with a shorter one."""
        if split not in _SURNAMES:
            raise UserError(f"split must be 'train' or 'heldout', not {split!r}")
        return [self._task(split, seed, index) for index in range(count)]

    def start(self, task: Task) -> "LookupEpisode":
        return LookupEpisode(task, self.max_turns)

    def _task(self, split: str, seed: int, index: int) -> Task:
        draw = random.Random(f"{split}:{seed}:{index}")
        names = [f"{first} {last}" for first in _FIRST_NAMES for last in _SURNAMES[split]]
        records = {
            name: {field: draw.choice(values) for field, values in _FIELDS.items()}
            for name in draw.sample(names, self.people)
        }
        person, field = draw.choice(list(records)), draw.choice(list(_FIELDS))
        return Task(
            id=f"lookup/{split}/{seed}/{index}",
            text=f"What is the {field} of {person}?",
            group=field,
            data={"records": records, "person": person, "field": field},
        )


class LookupEpisode:
    """One question; remembers which records were read."""

    def __init__(self, task: Task, max_turns: int) -> None:
        self.messages: Sequence[Message] = [
            {"role": "system", "content": INSTRUCTION},
            {"role": "user", "content": task.text},
        ]
        self._records: dict[str, dict[str, str]] = task.data["records"]
        self._person: str = task.data["person"]
        self._answer: str = self._records[self._person][task.data["field"]]
        self._person_was_read = False
        self._turns_left = max_turns

    def step(self, action: str) -> StepResult:
        if self._turns_left == 0:
            return StepResult("", 0.0, True)
        self._turns_left -= 1
        command = _COMMAND.search(action)
        if command is not None and command[1].lower() == "answer":
            self._turns_left = 0
            right = _plain(command[2]) == _plain(self._answer)
            return StepResult("", float(right and self._person_was_read), True)
        observation = _FORMAT_HINT if command is None else self._look_up(command[2])
        return StepResult(observation, 0.0, self._turns_left == 0)

    def _look_up(self, asked: str) -> str:
        for name, record in self._records.items():
            if _plain(name) == _plain(asked):
                self._person_was_read |= name == self._person
                return f"{name}: " + ", ".join(f"{field} {value}" for field, value in record.items())
        return f"No record of that name. On file: {', '.join(self._records)}."


def _plain(text: str) -> str:
    """As compared: without case, outer blanks, quotes and a full stop."""
    return text.strip().strip("'\".").strip().casefold()
