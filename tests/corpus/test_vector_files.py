"""Vectors on disk: whole or not at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from embedlab.corpus.vector_files import vector_file
from embedlab.errors import UserError


def some(n: int, dim: int = 5, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, dim)).astype(np.float32)


@pytest.mark.parametrize("sizes", [[3], [3, 1, 7], [1] * 12])
def test_npy_chunks_read_back_as_one_array(tmp_path: Path, sizes: list[int]) -> None:
    path = tmp_path / "v.npy"
    parts = [some(n, seed=i) for i, n in enumerate(sizes)]
    with vector_file(path) as target:
        for part in parts:
            target.add(range(len(part)), part)
    loaded = np.load(path)
    assert loaded.dtype == np.float32
    assert np.array_equal(loaded, np.concatenate(parts))
    mapped = np.load(path, mmap_mode="r")
    assert mapped.shape == loaded.shape
    assert [p.name for p in tmp_path.iterdir()] == ["v.npy"]


def test_parquet_keeps_row_numbers(tmp_path: Path) -> None:
    path = tmp_path / "v.parquet"
    with vector_file(path) as target:
        target.add([1, 2, 5], some(3))
        target.add([9], some(1, seed=1))
    table = pq.read_table(path)
    assert table.column("row").to_pylist() == [1, 2, 5, 9]
    vectors = np.array(table.column("vector").to_pylist(), dtype=np.float32)
    assert np.array_equal(vectors, np.concatenate([some(3), some(1, seed=1)]))


def test_any_memory_layout_and_float_type_is_stored_right(tmp_path: Path) -> None:
    vectors = some(4).astype(np.float64)
    with vector_file(tmp_path / "v.npy") as target:
        target.add(range(4), np.asfortranarray(vectors))
        target.add(range(2), vectors[::2])
    assert np.allclose(np.load(tmp_path / "v.npy"), np.concatenate([vectors, vectors[::2]]))


@pytest.mark.parametrize("name", ["v.npy", "v.parquet"])
def test_a_failure_keeps_the_old_file_and_leaves_no_other(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"old")

    def half() -> None:
        with vector_file(path) as target:
            target.add([1, 2], some(2))
            raise RuntimeError("halfway")

    with pytest.raises(RuntimeError, match="halfway"):
        half()
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown kind of output.*\.npy or \.parquet"):
        vector_file(tmp_path / "v.csv")
    with pytest.raises(UserError, match="no such folder"):
        vector_file(tmp_path / "none" / "v.npy").__enter__()
