"""Files of vectors for `embedlab.encoders.codes`: read in blocks, calibrated on, and rewritten in another store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embedlab.encoders.codes import calibrate
from embedlab.errors import UserError

RANGES = "ranges.npy"
"""[2, D] float32, the least and the largest value of each feature: one file for all shards and parts."""
_ROWS = 1 << 14


def vector_blocks(path: Path, rows: int = _ROWS) -> Iterator[NDArray[np.float32]]:
    """The vectors of a .npy or .parquet file in blocks [n, D] of at most `rows`, float32.

    Raises:
        UserError: no such file, another kind of file, or one that holds no vectors.
    """
    if not path.is_file():
        raise UserError("no such file", file=path, fix="a .npy or .parquet file of vectors")
    if path.suffix.lower() == ".parquet":
        yield from _parquet_blocks(path, rows)
        return
    if path.suffix.lower() != ".npy":
        raise UserError("holds no vectors", file=path, fix="a .npy or .parquet file of vectors")
    vectors = _npy(path)
    if vectors.ndim != 2 or vectors.dtype not in (np.float32, np.float16, np.float64):
        told = f"holds {vectors.dtype} of shape {vectors.shape}, no rows of floats"
        raise UserError(told, file=path, fix="vectors as embedlab encode writes them")
    for start in range(0, len(vectors), rows):
        yield np.asarray(vectors[start : start + rows], dtype=np.float32)


def _npy(path: Path) -> NDArray[np.generic]:
    try:
        found: NDArray[np.generic] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError, SyntaxError, TypeError) as error:  # numpy's, of its header
        raise UserError(f"is damaged ({error})", file=path, fix="another copy of the file") from error
    return found


def _parquet_blocks(path: Path, rows: int) -> Iterator[NDArray[np.float32]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(rows, columns=["vector"]):
                (column,) = batch.columns
                width = len(column[0]) if len(column) else 0
                flat = np.asarray(column.flatten().to_numpy(zero_copy_only=False), dtype=np.float32)
                yield flat.reshape(len(column), width)
    except (OSError, ValueError, AttributeError, pa.ArrowException) as error:
        text = " ".join(str(error).split())[:200]
        raise UserError(
            f"holds no column of vectors ({text})", file=path, fix="as embedlab encode writes it"
        ) from error


def calibration(path: Path) -> NDArray[np.float32]:
    """The ranges [2, D] that ``calibration=FILE`` names: a `RANGES` file, or those of a file of vectors.

    Raises:
        UserError: as `vector_blocks`; a row that is not finite, a file without rows.
    """
    try:
        if path.name != RANGES:
            return calibrate(vector_blocks(path))
        ranges = np.concatenate(list(vector_blocks(path)))
        if len(ranges) != 2 or not (ranges[0] <= ranges[1]).all():  # NaN too
            raise UserError("holds no ranges: two rows, the least and the largest values", fix="another copy")
        return ranges
    except UserError as error:
        error.file, error.key = error.file or str(path), error.key or "calibration"
        error.row = error.index + 1 if error.index is not None else error.row
        raise
