"""Exact inner-product search over unit vectors: FAISS IndexFlatIP, or the same scan in numpy where it is missing.

The two agree on the hits and their order. FAISS is not a dependency of the package (its CPU and GPU builds exclude
each other), and a flat scan is one matrix product, so a machine without it is slower, not shut out.
"""

import importlib.util
from typing import Any, Protocol

import numpy as np

Hits = list[tuple[int, float]]  # (row, score), best first; equal scores keep the older row first


class FlatIndex(Protocol):
    """Vectors in the order they were added."""

    def add(self, vectors: np.ndarray) -> None:
        """Append vectors  # (n, D) fp32, unit length."""
        ...

    def vectors(self) -> np.ndarray:
        """Every vector, bit for bit as it was added  # (N, D) fp32."""
        ...

    def search(self, queries: np.ndarray, k: int, allowed: np.ndarray | None = None) -> list[Hits]:
        """The k best rows for each of queries  # (Q, D), of those with allowed  # (N,) bool; fewer if fewer exist."""
        ...


def flat_index(dim: int) -> FlatIndex:
    """An empty index for vectors of `dim` numbers."""
    return FaissIndex(dim) if importlib.util.find_spec("faiss") else NumpyIndex(dim)


class FaissIndex:
    """`FlatIndex` over faiss.IndexFlatIP."""

    def __init__(self, dim: int) -> None:
        import faiss

        self._faiss: Any = faiss
        self._index = faiss.IndexFlatIP(dim)

    def add(self, vectors: np.ndarray) -> None:
        self._index.add(np.ascontiguousarray(vectors, dtype=np.float32))

    def vectors(self) -> np.ndarray:
        if self._index.ntotal == 0:
            return np.empty((0, self._index.d), dtype=np.float32)
        return self._index.reconstruct_n(0, self._index.ntotal)

    def search(self, queries: np.ndarray, k: int, allowed: np.ndarray | None = None) -> list[Hits]:
        parameters = None
        if allowed is not None:
            bits = np.packbits(allowed, bitorder="little")
            selector = self._faiss.IDSelectorBitmap(bits)
            parameters = self._faiss.SearchParameters(sel=selector)
        scores, rows = self._index.search(
            np.ascontiguousarray(queries, dtype=np.float32), k, params=parameters
        )
        return [
            _clean(query_rows, query_scores) for query_rows, query_scores in zip(rows, scores, strict=True)
        ]


class NumpyIndex:
    """`FlatIndex` as one matrix product."""

    def __init__(self, dim: int) -> None:
        self._vectors = np.empty((0, dim), dtype=np.float32)

    def add(self, vectors: np.ndarray) -> None:
        self._vectors = np.concatenate([self._vectors, vectors.astype(np.float32, copy=False)])

    def vectors(self) -> np.ndarray:
        return self._vectors

    def search(self, queries: np.ndarray, k: int, allowed: np.ndarray | None = None) -> list[Hits]:
        scores = queries.astype(np.float32, copy=False) @ self._vectors.T  # (Q, N)
        if allowed is not None:
            scores[:, ~allowed] = -np.inf
        best = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        best_scores = np.take_along_axis(scores, best, axis=1)
        rows = np.where(np.isfinite(best_scores), best, -1)
        return [
            _clean(query_rows, query_scores)
            for query_rows, query_scores in zip(rows, best_scores, strict=True)
        ]


def _clean(rows: np.ndarray, scores: np.ndarray) -> Hits:
    # FAISS fills a short answer up with row -1 and score -3.4e38; as a Python index, -1 would be the newest entry
    found = [(row, score) for row, score in zip(rows.tolist(), scores.tolist(), strict=True) if row >= 0]
    return sorted(found, key=lambda hit: (-hit[1], hit[0]))
