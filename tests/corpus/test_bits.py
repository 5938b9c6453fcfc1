"""An index of vectors with a bit a feature: the nearest codes by Hamming distance, then the best by the floats."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from embedlab.cli.main import main
from embedlab.corpus import stored
from embedlab.corpus.search import Index, build_vector_index
from embedlab.corpus.stored import Source
from embedlab.encoders.codes import Codes, Store
from embedlab.evaluation.core import nearest
from embedlab.evaluation.core.nearest import unit

BITS: tuple[Store, ...] = ("binary", "ubinary")


def indexed(folder: Path, vectors: NDArray[np.float32], store: Store, cuts: tuple[int, ...] = ()) -> Index:
    """An index of the codes of vectors [n, D], in files that end at `cuts`."""
    codes = Codes(store, vectors.shape[1])
    files = [folder / f"{i}.npy" for i in range(len(cuts) + 1)]
    for file, part in zip(files, np.split(codes.encode(vectors), cuts), strict=True):
        np.save(file, part)
    build_vector_index(folder / "index", Source(files, codes), overwrite=True)
    return Index(folder / "index")


def drawn(n: int, dim: int, seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(n, dim)).astype(np.float32)


def clustered(n: int, dim: int, seed: int) -> NDArray[np.float32]:
    """Twenty rows about each of their centres, at a cosine of some 0.7."""
    centres = drawn(n // 20, dim, seed)
    return np.repeat(centres, 20, axis=0) + drawn(n, dim, seed + 1)


def cosines(queries: NDArray[np.float32], vectors: NDArray[np.float32]) -> NDArray[np.float64]:
    """Of float queries [q, D] with the signs of vectors [n, D], by their definition."""
    signs = np.where(vectors > 0, 1.0, -1.0)
    q = queries / np.linalg.norm(queries, axis=1, keepdims=True)
    return q @ (signs / np.sqrt(vectors.shape[1])).T


sizes = st.tuples(st.integers(1, 5), st.integers(2, 60), st.integers(1, 70), st.integers(0, 2**32 - 1))


@given(sizes, st.sampled_from(BITS), st.integers(1, 70), st.integers(1, 30))
def test_with_all_rows_as_candidates_it_is_the_exact_search(
    tmp_path_factory: pytest.TempPathFactory,
    shape: tuple[int, int, int, int],
    store: Store,
    k: int,
    block: int,
) -> None:
    q, n, dim, seed = shape
    queries, vectors = drawn(q, dim, seed), drawn(n, dim, seed + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored, "BLOCK", block)
        index = indexed(tmp_path_factory.mktemp("bits"), vectors, store, (n // 2,))
        index.tune(rescore=n)
        places, scores = index.nearest(unit(torch.from_numpy(queries)), k)
    exact = cosines(queries, vectors)
    best = -np.sort(-exact, axis=1)[:, :k]
    np.testing.assert_allclose(scores, best, atol=1e-5)
    np.testing.assert_allclose(np.take_along_axis(exact, places.numpy(), 1), best, atol=1e-5)
    assert all(len(set(row)) == len(row) for row in places.tolist())


@given(sizes, st.sampled_from(BITS), st.integers(1, 9), st.integers(1, 5))
def test_candidates_are_the_nearest_codes(
    tmp_path_factory: pytest.TempPathFactory,
    shape: tuple[int, int, int, int],
    store: Store,
    k: int,
    rescore: int,
) -> None:
    q, n, dim, seed = shape
    queries, vectors = drawn(q, dim, seed), drawn(n, dim, seed + 1)
    index = indexed(tmp_path_factory.mktemp("bits"), vectors, store)
    index.tune(rescore=rescore)
    places, scores = index.nearest(unit(torch.from_numpy(queries)), k)
    distance = ((queries > 0)[:, None] != (vectors > 0)[None]).sum(2)
    candidates = np.argsort(distance, axis=1, kind="stable")[:, : k * rescore]
    best = -np.sort(-np.take_along_axis(cosines(queries, vectors), candidates, 1), axis=1)[:, :k]
    np.testing.assert_allclose(scores, best, atol=1e-5)
    assert all(
        set(row) <= set(wanted) for row, wanted in zip(places.tolist(), candidates.tolist(), strict=True)
    )


@pytest.mark.parametrize("store", BITS)
def test_of_clusters_few_candidates_find_nearly_all(tmp_path: Path, store: Store) -> None:
    vectors = clustered(2000, 256, 0)
    queries = vectors[::50] + drawn(40, 256, 7) / 2
    index = indexed(tmp_path, vectors, store, (700, 701))
    want = np.argsort(-cosines(queries, vectors), axis=1)[:, :10]
    recalls = []
    for rescore in (1, None, 200):
        index = Index(index.folder)
        index.tune(rescore=rescore)
        places, _ = index.nearest(unit(torch.from_numpy(queries)), 10)
        found = [len({*a} & {*b}) for a, b in zip(want.tolist(), places.tolist(), strict=True)]
        recalls.append(float(np.mean(found)) / 10)
    assert recalls[0] < recalls[1], "more candidates than answers are worth it"
    assert recalls[1] > 0.97, "by four an answer"
    assert recalls[2] == 1


@pytest.mark.parametrize("store", BITS)
def test_no_more_than_a_block_is_held(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    index = indexed(tmp_path, drawn(500, 40, 0), store)
    compared, decoded = [], []
    ones, levels = nearest._ones, Codes.levels
    monkeypatch.setattr(nearest, "_SCORES_AT_ONCE", 200)
    monkeypatch.setattr(nearest, "_ones", lambda words: compared.append(words.shape[1]) or ones(words))
    monkeypatch.setattr(
        Codes, "levels", lambda self, codes: decoded.append(len(codes)) or levels(self, codes)
    )
    index.nearest(unit(torch.from_numpy(drawn(5, 40, 1))), 3)
    assert max(compared) * 5 * 2 <= 200
    assert sum(compared) == 5 * 500
    assert decoded == [3 * 4] * 5, "of each query its candidates alone"


def test_candidates_of_a_query_can_be_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vectors = clustered(200, 64, 3)
    np.save(tmp_path / "queries.npy", vectors[:4] + drawn(4, 64, 5))
    command = ["search", "query", str(tmp_path / "index"), f"queries={tmp_path / 'queries.npy'}", "k=5"]

    def asked(*more: str) -> list[str]:
        assert main([*command, *more]) == 0
        return capsys.readouterr().out.splitlines()

    exact = np.sort(cosines(np.load(tmp_path / "queries.npy"), vectors), axis=1)[:, :-6:-1]
    indexed(tmp_path, vectors, "ubinary")
    assert [line.split("\t")[1] for line in asked("rescore=40")] == [f"{x:.4f}" for x in exact.ravel()]
    assert asked("rescore=1") != asked("rescore=40")
    assert main([*command, "nprobe=4"]) == 2
    assert "is exact (nprobe=4)" in capsys.readouterr().err
    np.save(tmp_path / "x.npy", vectors)
    assert main(["search", "index", str(tmp_path / "x.npy"), str(tmp_path / "index"), "overwrite=true"]) == 0
    capsys.readouterr()
    assert main([*command, "rescore=4"]) == 2
    assert "is exact (rescore=4)" in capsys.readouterr().err
