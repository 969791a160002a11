"""What the tests of the bank share: an encoder by table, short forms of experiences, and damage."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from lopd_fast.bank import Experience


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


def edit_header(**changes) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "bank.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


class Bomb:
    """Leaves a mark when unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)
