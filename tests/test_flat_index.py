"""The index against brute force."""

import faiss
import numpy as np
import pytest

from lopd_fast.flat_index import FaissIndex, FlatIndex, NumpyIndex, flat_index

INDEXES = [FaissIndex, NumpyIndex]


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
