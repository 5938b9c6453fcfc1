"""Vectors on disk: whole or not at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from embedlab.corpus.vector_files import FORMATS, read_vectors, stored, vector_file
from embedlab.encoders.codes import STORES, Codes, calibrate
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


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("store", STORES)
def test_blocks_are_read_as_they_were_written(tmp_path: Path, suffix: str, store: str) -> None:
    codes = Codes(store, 13, calibrate([some(40, 13)]))
    with vector_file(tmp_path / f"v{suffix}", codes) as target:
        target.add([3, 4, 9], some(3, 13))
        target.add([12], some(1, 13, seed=1))
    blocks = list(read_vectors(tmp_path / f"v{suffix}"))
    found = np.concatenate([block for _, block in blocks])
    assert found.dtype == codes.dtype
    np.testing.assert_array_equal(found, codes.encode(np.concatenate([some(3, 13), some(1, 13, seed=1)])))
    rows = [row for numbers, _ in blocks for row in numbers]
    assert rows == ([0, 1, 2, 3] if suffix == ".npy" else [3, 4, 9, 12])


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_file_without_rows_has_their_width(tmp_path: Path, suffix: str) -> None:
    with vector_file(tmp_path / f"v{suffix}", Codes("ubinary", 13)):
        pass
    assert [len(block) for _, block in read_vectors(tmp_path / f"v{suffix}")] in ([], [0])
    if suffix == ".npy":
        assert np.load(tmp_path / "v.npy").shape == (0, 2)


def test_a_vector_beyond_float16_is_named_by_its_place() -> None:
    vectors = some(4)
    vectors[2, 1] = 7e4
    with pytest.raises(UserError, match="beyond the range of float16") as caught:
        stored(vectors, Codes("float16", 5))
    assert caught.value.index == 2
    assert np.isfinite(stored(vectors, Codes("float32", 5))).all()
