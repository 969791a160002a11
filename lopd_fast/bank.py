"""The experience bank: successful rollouts, found again by the task that is asked about.

Documents are embedded as task + trace, queries as task alone (asymmetric), all at unit length, and searched by exact
inner product; LOPD takes the J = 3 nearest. `bank_files` has the folder a bank is saved to.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lopd_fast.bank_files import StoredBank, read_bank, write_bank
from lopd_fast.errors import UserError
from lopd_fast.experience import Experience, linearise, read_experiences
from lopd_fast.flat_index import flat_index
from lopd_fast.retriever import Encoder, Progress, SentenceEncoder, unit_rows

__all__ = [
    "AddReport",
    "Experience",
    "ExperienceBank",
    "Hit",
    "linearise",
    "read_experiences",
]

_PROBE = "Reverse the order of the words in a sentence."
# Cosine of two probe vectors: other weights give far less, another dtype or device of the same ones more.
_SAME_ENCODER = 0.98


class Hit(NamedTuple):
    """One retrieved experience and its cosine to the query."""

    experience: Experience
    score: float


class AddReport(NamedTuple):
    """What became of experiences handed to `ExperienceBank.add`."""

    added: int
    merged: int  # same group, task and trace as one already there
    below_reward: int


class ExperienceBank:
    """Experiences and the index over them, in the order they were added; grows online.

    encoder: embeds documents and queries. min_reward: what is below it is not admitted.
    """

    def __init__(self, encoder: Encoder, *, min_reward: float = 1.0) -> None:
        self.encoder = encoder
        self.min_reward = min_reward
        self.experiences: list[Experience] = []
        self._index = flat_index(encoder.dim)
        self._row_of_content: dict[tuple[str, str, str], int] = {}
        self._row_of_id: dict[str, int] = {}
        self._rows_of_task: dict[str, list[int]] = defaultdict(list)
        self._rows_of_group: dict[str, list[int]] = defaultdict(list)

    def __len__(self) -> int:
        return len(self.experiences)

    def add(self, experiences: Sequence[Experience], *, progress: Progress | None = None) -> AddReport:
        """Admit experiences, embedding only those that are new; on an error the bank stays as it was.

        An experience with the group, task and trace of one already there is merged into it: the entry keeps its id
        and takes the better quality (and reward). Raises UserError where one id would name two experiences.
        """
        good = [experience for experience in experiences if experience.reward >= self.min_reward]
        new: dict[tuple[str, str, str], Experience] = {}
        better: dict[tuple[str, str, str], Experience] = {}
        ids: set[str] = set()
        for experience in good:
            key = experience.content
            known = better.get(key) or new.get(key) or self._known(key)
            if known is None:
                if experience.id in self._row_of_id or experience.id in ids:
                    raise UserError(
                        f"two different experiences have the id {experience.id!r}: give each its own id."
                    )
                ids.add(experience.id)
                new[key] = experience
            elif experience.quality > known.quality:
                (new if key in new else better)[key] = replace(experience, id=known.id)
        if new:
            texts = [_document(experience) for experience in new.values()]
            vectors = self._unit(
                self.encoder.embed_documents(texts, progress), [entry.id for entry in new.values()]
            )
            self._append(list(new.values()), vectors)
        for key, experience in better.items():
            self.experiences[self._row_of_content[key]] = experience
        return AddReport(len(new), len(good) - len(new), len(experiences) - len(good))

    def search(
        self,
        tasks: Sequence[str],
        j: int = 3,
        *,
        exclude_ids: Sequence[Collection[str] | None] | None = None,
        allow_self: bool = True,
        groups: Sequence[Collection[str] | None] | None = None,
    ) -> list[list[Hit]]:
        """The j experiences nearest to each task, best first; fewer where fewer are allowed. Exact in every case.

        exclude_ids, groups: one entry for each task, None for no restriction: ids never to return, and the only
        groups to return. allow_self False leaves out experiences of the very task that is asked about.
        Raises UserError for an empty bank, j < 1, or lists of unequal length.
        """
        if isinstance(tasks, str):
            raise UserError("search takes a list of tasks, not one text: put it in a list.")
        if j < 1:
            raise UserError(f"j is {j}: ask for at least 1 experience.")
        if not self.experiences:
            raise UserError("the experience bank is empty: add successful rollouts before searching it.")
        for name, per_task in (("exclude_ids", exclude_ids), ("groups", groups)):
            if per_task is not None and len(per_task) != len(tasks):
                raise UserError(f"{name} has {len(per_task)} entries for {len(tasks)} tasks: give one each.")
            if per_task is not None and any(isinstance(entry, str) for entry in per_task):
                raise UserError(f"each entry of {name} is a set of names or None, not one text.")
        if not tasks:
            return []
        queries = self._unit(self.encoder.embed_queries(tasks), tasks)  # (Q, D)
        allowed = [
            self._allowed(
                task,
                exclude_ids[position] if exclude_ids is not None else None,
                groups[position] if groups is not None else None,
                allow_self,
            )
            for position, task in enumerate(tasks)
        ]
        found: list[list[tuple[int, float]]] = [[] for _ in tasks]
        free = [position for position, mask in enumerate(allowed) if mask is None]
        if free:  # unrestricted queries share one scan
            for position, hits in zip(free, self._index.search(queries[free], j), strict=True):
                found[position] = hits
        for position, mask in enumerate(allowed):
            if mask is not None:
                found[position] = self._index.search(queries[position : position + 1], j, mask)[0]
        return [[Hit(self.experiences[row], score) for row, score in hits] for hits in found]

    def save(self, folder: str | Path) -> None:
        """Write the bank to `folder`, replacing the bank that may be there in one step; see `bank_files`."""
        write_bank(folder, self.snapshot())

    def snapshot(self) -> StoredBank:
        """The bank as it is now, for `bank_files.write_bank`; what is added later is not in it."""
        header = {
            "count": len(self),
            "dim": self.encoder.dim,
            "min_reward": self.min_reward,
            "encoder": {
                "name": self.encoder.name,
                "query_prompt": self.encoder.query_prompt,
                "document_prompt": self.encoder.document_prompt,
            },
        }
        return StoredBank(header, list(self.experiences), self._index.vectors(), self._probe())

    @classmethod
    def load(
        cls,
        folder: str | Path,
        encoder: Encoder | str | Path = "",
        *,
        device: str | None = None,
        trust_remote_code: bool = False,
    ) -> "ExperienceBank":
        """Open a saved bank, with an encoder or with the folder where its encoder is now ("": where it was).

        Raises UserError where the folder is missing or its counts disagree, and where `encoder` is not the one that
        the documents were embedded with: its width, its document prompt, or its vector for a fixed probe text
        differs. (The name does not count: a model folder may move. Nor does the query prompt: it is not in the bank.)
        """
        stored = read_bank(folder)
        recorded = stored.header["encoder"]
        if isinstance(encoder, str | Path):
            encoder = SentenceEncoder(
                encoder or recorded["name"],
                query_prompt=recorded["query_prompt"],
                document_prompt=recorded["document_prompt"],
                device=device,
                trust_remote_code=trust_remote_code,
            )
        bank = cls(encoder, min_reward=stored.header["min_reward"])
        same = encoder.dim == stored.header["dim"] and encoder.document_prompt == recorded["document_prompt"]
        if not (same and float(bank._probe() @ stored.probe) > _SAME_ENCODER):
            raise UserError(
                f"the bank in {folder} was built with the encoder {recorded['name']} (dim {stored.header['dim']}, "
                f"document prompt {recorded['document_prompt']!r}), not with {encoder.name} (dim {encoder.dim}, "
                f"document prompt {encoder.document_prompt!r}): use that encoder, or build the bank again."
            )
        if stored.experiences:
            bank._append(stored.experiences, stored.embeddings)
        return bank

    def _known(self, key: tuple[str, str, str]) -> Experience | None:
        row = self._row_of_content.get(key)
        return None if row is None else self.experiences[row]

    def _append(self, experiences: list[Experience], vectors: np.ndarray) -> None:
        self._index.add(vectors)
        for row, experience in enumerate(experiences, start=len(self.experiences)):
            self._row_of_content[experience.content] = row
            self._row_of_id[experience.id] = row
            self._rows_of_task[experience.task.strip()].append(row)
            self._rows_of_group[experience.group].append(row)
        self.experiences.extend(experiences)

    def _allowed(
        self, task: str, exclude_ids: Collection[str] | None, groups: Collection[str] | None, allow_self: bool
    ) -> np.ndarray | None:
        """Which rows a query may return  # (N,) bool; None for all of them."""
        banned = [self._row_of_id[name] for name in exclude_ids or () if name in self._row_of_id]
        if not allow_self:
            banned += self._rows_of_task.get(task.strip(), [])
        if groups is None and not banned:
            return None
        mask = np.full(len(self), groups is None)
        for group in groups or ():
            mask[self._rows_of_group.get(group, [])] = True
        mask[banned] = False
        return mask

    def _unit(self, vectors: np.ndarray, names: Sequence[str]) -> np.ndarray:
        vectors = np.asarray(vectors)
        if vectors.shape != (len(names), self.encoder.dim):
            raise UserError(
                f"the encoder {self.encoder.name} gave vectors of shape {vectors.shape} for {len(names)} texts, "
                f"and says that its width is {self.encoder.dim}."
            )
        return unit_rows(vectors, names)

    def _probe(self) -> np.ndarray:
        return self._unit(self.encoder.embed_documents([_PROBE]), ["the probe text"])[0]


def _document(experience: Experience) -> str:
    return f"{experience.task}\n\n{experience.trace}"
