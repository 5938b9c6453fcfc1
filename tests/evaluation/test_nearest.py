"""Nearest neighbours in blocks are those of a full sort, whatever the blocks, the store and the ties."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from embedlab.encoders.codes import STORES, Codes, Store, calibrate
from embedlab.errors import UserError
from embedlab.evaluation.core import nearest
from embedlab.evaluation.core.nearest import CodesTopK, TopK

sizes = st.tuples(st.integers(1, 5), st.integers(1, 40), st.integers(1, 70), st.integers(0, 2**32 - 1))


def drawn(n: int, dim: int, seed: int) -> NDArray[np.float32]:
    """Small whole numbers, whose products are exact and often equal; none is zero."""
    return np.random.default_rng(seed).integers(-2, 2, (n, dim)).astype(np.float32) + 0.5


def blocks(rows: NDArray[np.generic], size: int) -> Iterator[NDArray[np.generic]]:
    return (rows[i : i + size] for i in range(0, len(rows), size))


def order(scores: NDArray[np.floating], k: int) -> NDArray[np.int64]:
    return np.argsort(-scores, axis=1, kind="stable")[:, :k]


@given(sizes, st.integers(1, 50), st.integers(1, 45))
def test_of_equal_scores_the_document_that_came_first_is_kept(
    shape: tuple[int, int, int, int], k: int, block: int
) -> None:
    q, n, dim, seed = shape
    dim = min(dim, 3)  # many ties
    queries, documents = drawn(q, dim, seed), drawn(n, dim, seed + 1)
    top = TopK(torch.from_numpy(queries), k)
    for part in blocks(documents, block):
        top.add(torch.from_numpy(part))
    scores = queries @ documents.T
    np.testing.assert_array_equal(top.rows, order(scores, k))
    np.testing.assert_array_equal(top.scores, np.take_along_axis(scores, order(scores, k), 1))


def found(queries: Tensor, codes: Codes, rows: NDArray[np.generic], k: int, block: int, rescore: int = 4):  # type: ignore[no-untyped-def]
    top = CodesTopK(queries, codes, k, rescore)
    for part in blocks(rows, block):
        top.add(part)
    return top.result()


@given(sizes, st.sampled_from(STORES), st.integers(1, 50), st.integers(1, 45))
def test_codes_are_ranked_by_what_they_stand_for(
    shape: tuple[int, int, int, int], store: Store, k: int, block: int
) -> None:
    q, n, dim, seed = shape
    queries, documents = drawn(q, dim, seed), drawn(n, dim, seed + 1)
    codes = Codes(store, dim, calibrate([documents]))
    rows = codes.encode(documents)
    scores, places = found(torch.from_numpy(queries), codes, rows, k, block, rescore=n)  # all are candidates
    exact = queries.astype(np.float64) @ codes.decode(rows).astype(np.float64).T
    best = np.take_along_axis(exact, order(exact, k), 1)
    np.testing.assert_allclose(scores, best, atol=1e-4)
    np.testing.assert_allclose(np.take_along_axis(exact, places.numpy(), 1), best, atol=1e-4)
    assert all(len(set(row)) == len(row) for row in places.tolist())


@given(
    sizes, st.sampled_from(["binary", "ubinary"]), st.integers(1, 9), st.integers(1, 45), st.integers(1, 5)
)
def test_candidates_are_the_nearest_by_hamming_distance(
    shape: tuple[int, int, int, int], store: Store, k: int, block: int, rescore: int
) -> None:
    q, n, dim, seed = shape
    queries, documents = drawn(q, dim, seed), drawn(n, dim, seed + 1)
    codes = Codes(store, dim)
    scores, places = found(torch.from_numpy(queries), codes, codes.encode(documents), k, block, rescore)
    distance = ((queries > 0)[:, None] != (documents > 0)[None]).sum(2)
    candidates = np.sort(np.argsort(distance, axis=1, kind="stable")[:, : k * rescore], axis=1)
    exact = np.take_along_axis(queries @ np.where(documents > 0, 1, -1).T, candidates, 1)
    best = order(exact, k)
    np.testing.assert_array_equal(places, np.take_along_axis(candidates, best, 1))
    np.testing.assert_allclose(scores, np.take_along_axis(exact, best, 1), atol=1e-4)


def test_bits_are_counted_without_numpy_2_too(monkeypatch: pytest.MonkeyPatch) -> None:
    words = np.random.default_rng(0).integers(0, 2**63, (3, 50)).astype(np.uint64)
    new = nearest._ones(words)
    if hasattr(np, "bitwise_count"):
        monkeypatch.delattr(np, "bitwise_count")
    np.testing.assert_array_equal(nearest._ones(words), new)
    assert new[0] == sum(int(w).bit_count() for w in words[:, 0])


def test_what_makes_no_sense_is_refused() -> None:
    queries = torch.ones(1, 4)
    with pytest.raises(UserError, match="rescore=0"):
        CodesTopK(queries, Codes("binary", 4), 3, rescore=0)
    with pytest.raises(UserError, match="k=0"):
        CodesTopK(queries, Codes("binary", 4), 0)
