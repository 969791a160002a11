"""The demo's environment: an agent answers questions about clients' staff databases with one SQL query, which is run.

Every client's database holds two tables of the same columns. One is live; the other was left behind by an old system
and holds outdated values. Which one is live, and what it is called, is the client's house convention: neither the
question nor the prompt tells. Past successes for the same client do, and those for a client with the other convention
mislead. A question is asked of the retriever without the client's name; the prompt has it, as a number that means
nothing to a model which was not taught.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lopd_fast.envs.base import Message, StepResult, Task
from lopd_fast.errors import UserError
from lopd_fast.sql_sandbox import SqlSandbox

TABLES = ("crew", "roster")
FIELDS = ("email", "phone", "city", "team")
SYSTEM = "You answer with one SQLite query."
PROMPT = "{company}\n{question}"
EXAMPLE = (  # what an answer looks like; its question is of another kind
    "Pet Shop\nWhat is the owner of Rex?",
    "SELECT owner FROM pets WHERE name = 'Rex';",
)
QUESTIONS = (
    "What is the {field} of {name}?",
    "Give me the {field} of {name}.",
    "I need the {field} of {name}.",
    "Which {field} does {name} have?",
)

# Splits share no person and no value.
_FIRST = {
    "train": "Ada Ben Cleo Dan Eva Finn Gina Hugo Ida Jack Kim Liam Mia Noah Olga Paul Rosa Sam Tina Vera".split(),
    "heldout": "Amy Bill Cora Dean Ella Fred Greta Hank Iris Jude Kate Leo Maya Nick Opal Pete Ruth Seth Will".split(),
}
_LAST = {
    "train": "Adams Baker Clark Davis Evans Ford Green Hill Irwin Jones King Lewis Moore Nash Owens Price".split(),
    "heldout": "Allen Brown Cooper Dixon Ellis Fox Grant Hayes Ingram James Knight Lane Mason Norris Reed".split(),
}
_CITY = {
    "train": "Paris Rome Oslo Madrid Vienna Dublin Lisbon Prague".split(),
    "heldout": "Berlin London Athens Warsaw Geneva Milan Turin Porto".split(),
}
_TEAM = {
    "train": "sales legal design finance support research".split(),
    "heldout": "marketing security logistics training quality planning".split(),
}
_AREA = {"train": "555", "heldout": "777"}


@dataclass(frozen=True)
class Company:
    """A client company and its house convention: the table that is live."""

    name: str
    live: str


COMPANIES = tuple(Company(f"Client {number}", TABLES[number % len(TABLES)]) for number in (8, 3, 6, 5))


class StaffDatabase:
    """Tasks over the databases of `companies`; use as a context manager, or close it, to end its SQL worker."""

    name = "staff_database"
    max_turns = 1

    def __init__(self, companies: Sequence[str] = (), people: int = 5) -> None:
        known = {company.name: company for company in COMPANIES}
        unknown = [name for name in companies if name not in known]
        if unknown:
            raise UserError(f"There is no company '{unknown[0]}'; the companies are {', '.join(known)}.")
        self.companies = [known[name] for name in companies] or list(COMPANIES)
        self.people = people
        self.sandbox = SqlSandbox()

    def tasks(self, split: str, count: int, seed: int) -> list[Task]:
        """`count` tasks, the companies taking turns; splits share no person and no value."""
        if split not in _FIRST:
            raise UserError(f"There is no split '{split}'; the splits are {', '.join(_FIRST)}.")
        rng = random.Random(f"{split} {seed}")
        return [
            self._task(rng, split, self.companies[i % len(self.companies)], f"{split}-{seed}-{i}")
            for i in range(count)
        ]

    def start(self, task: Task) -> "StaffEpisode":
        """Open the one-turn episode of `task`."""
        return StaffEpisode(task, self.sandbox)

    @property
    def conventions(self) -> dict[str, str]:
        """The live table of every company."""
        return {company.name: company.live for company in self.companies}

    def solution(self, task: Task) -> str:
        """The query that returns the live answer."""
        return task.data["solution"]

    def close(self) -> None:
        """End the SQL worker."""
        self.sandbox.close()

    def __enter__(self) -> "StaffDatabase":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _task(self, rng: random.Random, split: str, company: Company, id: str) -> Task:
        names = [
            f"{first} {last}"
            for first, last in zip(
                rng.sample(_FIRST[split], self.people), rng.choices(_LAST[split], k=self.people), strict=True
            )
        ]
        live = [_person(rng, split, name, company) for name in names]
        asked, field = rng.choice(live), rng.choice(FIELDS)
        question = rng.choice(QUESTIONS).format(field=field, name=asked["name"])
        tables = list(TABLES)
        rng.shuffle(tables)
        rows = {
            table: live
            if table == company.live
            else [
                _person(rng, split, name, company, avoid=person)
                for name, person in zip(names, live, strict=True)
            ]
            for table in tables
        }
        data: dict[str, Any] = {
            "script": _script(rows),
            "answer": asked[field],
            "field": field,
            "person": asked["name"],
            "prompt": PROMPT.format(company=company.name, question=question),
            "solution": f"SELECT {field} FROM {company.live} WHERE name = '{asked['name']}';",
        }
        return Task(id, question, company.name, data)


class StaffEpisode:
    """One question; the action is the SQL, the observation what it returned."""

    def __init__(self, task: Task, sandbox: SqlSandbox) -> None:
        self.task = task
        self.sandbox = sandbox
        self.messages: Sequence[Message] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": EXAMPLE[0]},
            {"role": "assistant", "content": EXAMPLE[1]},
            {"role": "user", "content": task.data["prompt"]},
        ]

    def step(self, action: str) -> StepResult:
        """Run the query; reward 1 if it returns the live answer and nothing else."""
        result = self.sandbox.query(self.task.id, self.task.data["script"], action.strip())
        if result.error is not None:
            return StepResult(f"error: {result.error}", 0.0, True)
        values = "; ".join(", ".join(str(value) for value in row) for row in result.rows) or "no rows"
        source = re.search(r"\bFROM\s+(\w+)", action, re.IGNORECASE)
        table = source.group(1) if source else "no table"
        observation = f"{table} table, {table} rows: {values}"
        right = list(result.rows) == [(self.task.data["answer"],)]
        return StepResult(observation, float(right), True)


def _person(
    rng: random.Random, split: str, name: str, company: Company, avoid: dict[str, str] | None = None
) -> dict[str, str]:
    """One person's facts; every one differs from those of `avoid`."""
    first, last = name.lower().split()
    handle = f"{first}.{last}" if avoid is None else f"{first[0]}{last}{rng.randint(1, 99)}"
    cities = [city for city in _CITY[split] if avoid is None or city != avoid["city"]]
    teams = [team for team in _TEAM[split] if avoid is None or team != avoid["team"]]
    phone = f"{_AREA[split]}-{rng.randint(1000, 9999)}"
    while avoid is not None and phone == avoid["phone"]:
        phone = f"{_AREA[split]}-{rng.randint(1000, 9999)}"
    return {
        "name": name,
        "email": f"{handle}@{company.name.replace(' ', '').lower()}.example",
        "phone": phone,
        "city": rng.choice(cities),
        "team": rng.choice(teams),
    }


def _script(rows: dict[str, list[dict[str, str]]]) -> str:
    """The SQL that builds the database; values are our own and hold no quote."""
    columns = ("name", *FIELDS)
    statements = []
    for table, people in rows.items():
        statements.append(f"CREATE TABLE {table} ({', '.join(f'{column} TEXT' for column in columns)});")
        for person in people:
            values = ", ".join(f"'{person[column]}'" for column in columns)
            statements.append(f"INSERT INTO {table} VALUES ({values});")
    return "\n".join(statements)
