"""Vectors on disk, read as unit rows: mapped .npy files, one after the other, in place; Parquet is copied first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embedlab.corpus.vector_files import NpyFile
from embedlab.errors import UserError
from embedlab.evaluation.core.nearest import unit

BLOCK = 1 << 16
"""Rows that are read at once."""
_DTYPES = ("float16", "float32", "float64")
_FIX = "build the index again"


class Part(NamedTuple):
    """A .npy file [rows, D]; a relative path is below the folder of the index."""

    path: Path
    rows: int


class Stored:
    """Vectors [n, D] of one or more .npy files, float32 and of length one when they are read.

    Args:
        parts: the files, in the order of their rows.
        dim: D.
        is_unit: whether the rows have length one on the disk already, to the last digit.
        fix: what to do about a file that is damaged.

    Raises:
        UserError: a part that is missing, no array of floats, or of another size; by its name.
    """

    def __init__(self, parts: Sequence[Part], dim: int, is_unit: bool = False, fix: str = _FIX) -> None:
        self.parts = [_mapped(part, dim, fix) for part in parts]
        self.paths = [part.path for part in parts]
        self.dim, self.is_unit, self._fix = dim, is_unit, fix
        self.starts: NDArray[np.int64] = np.cumsum([0, *(part.rows for part in parts)], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def pieces(self, most: int | None = None) -> Iterator[tuple[int, int]]:
        """First row and end of each stretch of at most `most` (None: `BLOCK`) rows; none lies in two files."""
        most = most or BLOCK
        for start, end in zip(self.starts[:-1].tolist(), self.starts[1:].tolist(), strict=True):
            yield from ((first, min(first + most, end)) for first in range(start, end, most))

    def block(self, first: int, end: int) -> Tensor:
        """Rows [first, end), which are of one file."""
        place = int(np.searchsorted(self.starts, first, side="right")) - 1
        start = int(self.starts[place])
        return self._read(place, slice(first - start, end - start))

    def take(self, rows: NDArray[np.int64]) -> Tensor:
        """Rows [m] by number, in the order asked for: [m, D]."""
        order = np.argsort(rows, kind="stable")
        places = np.searchsorted(self.starts, rows[order], side="right") - 1
        found = torch.empty(len(rows), self.dim)
        for place in np.unique(places).tolist():
            chosen = order[places == place]
            found[torch.from_numpy(chosen)] = self._read(place, rows[chosen] - int(self.starts[place]))
        return found

    def _read(self, place: int, rows: Any) -> Tensor:
        # A copy: torch does not take read-only memory.
        block = torch.from_numpy(np.array(self.parts[place][rows], dtype=np.float32))
        if not bool(torch.isfinite(block).all()):
            raise UserError("is damaged (a vector is not finite)", file=self.paths[place], fix=self._fix)
        return block if self.is_unit else unit(block)


def _mapped(part: Part, dim: int, fix: str) -> NDArray[Any]:
    try:
        found: NDArray[Any] = np.load(part.path, mmap_mode="r")
    except FileNotFoundError:
        raise UserError("no such file: a part of the vectors is missing", file=part.path, fix=fix) from None
    except (OSError, ValueError, EOFError, SyntaxError, TypeError) as error:  # numpy's, of its header
        raise UserError(f"is damaged ({error})", file=part.path, fix=fix) from error
    if not isinstance(found, np.ndarray) or found.dtype.name not in _DTYPES:
        raise UserError(f"is no array of {', '.join(_DTYPES)}", file=part.path, fix=fix)
    if found.shape != (part.rows, dim):
        raise UserError(
            f"is damaged (it is {found.shape}, not ({part.rows}, {dim}))", file=part.path, fix=fix
        )
    return found


@dataclass(frozen=True)
class Source:
    """Vectors as `embedlab encode` wrote them.

    files: .npy or .parquet, sorted; encoder and fingerprint: of what made them, "" where that is not known.
    """

    files: list[Path]
    encoder: str = ""
    fingerprint: str = ""


def find_vectors(path: Path) -> Source | None:
    """The vectors of a file or folder of `embedlab encode`; None where `path` holds texts.

    Raises:
        UserError: a folder without vectors.
    """
    if path.is_dir():
        files = sorted(p for end in (".npy", ".parquet") for p in path.glob(f"*{end}") if p.name[0] != ".")
        if not files:
            raise UserError("holds no .npy or .parquet file", file=path, fix="a folder of embedlab encode")
        return Source(files)
    if path.suffix == ".npy" and path.is_file():
        return Source([path])
    if path.suffix == ".parquet" and path.is_file() and _width(path) is not None:
        return Source([path])
    return None


def _width(path: Path) -> int | None:
    """D of the Parquet file's column ``vector``; None where it has none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        schema = pq.read_schema(path)
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"is damaged ({str(error).splitlines()[0]})", file=path) from None
    kind = schema.field("vector").type if "vector" in schema.names else None
    return kind.list_size if kind is not None and pa.types.is_fixed_size_list(kind) else None


def gather(source: Source, work: Path) -> tuple[list[Part], int, bool]:
    """Make mapped files of a source: .npy files stay where they are, Parquet is copied into ``work/vectors.npy``.

    Args:
        source: of one kind of file.
        work: the folder of the new index.

    Returns: the parts, D, and whether ``work/rows.npy`` (int64 [n]) has the numbers of the rows, which Parquet says.

    Raises:
        UserError: files of both kinds or of two widths, no rows, a file that is damaged.
    """
    if len({path.suffix for path in source.files}) > 1:
        raise UserError("holds .npy and .parquet files", file=source.files[0].parent, fix="one kind of file")
    if source.files[0].suffix == ".parquet":
        return *_copied(source.files, work), True
    parts, dims = [], []
    for path in source.files:
        try:
            shape = np.load(path, mmap_mode="r").shape
        except (OSError, ValueError, EOFError, SyntaxError, TypeError) as error:
            raise UserError(f"is damaged ({error})", file=path, fix="encode it again") from None
        if len(shape) != 2:
            raise UserError(f"is no table of vectors, but an array {shape}", file=path)
        if dims and shape[1] != dims[0]:
            raise UserError(f"is {shape[1]} wide, {source.files[0].name} {dims[0]}", file=path)
        dims.append(shape[1])
        parts.append(Part(path.resolve(), shape[0]))
    if not any(part.rows for part in parts):
        raise UserError("there is no vector", file=source.files[0])
    return [part for part in parts if part.rows], dims[0], False


def _copied(files: Sequence[Path], work: Path) -> tuple[list[Part], int]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    numbers: list[NDArray[np.int64]] = []
    with (work / "vectors.npy").open("wb") as stream:
        target = NpyFile(stream)
        for path in files:
            dim = _width(path)
            if dim is None or target.dim not in (0, dim):
                known = f"vectors of width {dim}" if dim else "no column of vectors"
                raise UserError(f"has {known}", file=path, fix=f"Parquet files as {files[0].name}")
            try:
                for batch in pq.ParquetFile(path).iter_batches(BLOCK, columns=["row", "vector"]):
                    numbers.append(batch.column("row").to_numpy().astype(np.int64))
                    vectors = batch.column("vector").flatten().to_numpy().reshape(-1, dim)
                    target.add(numbers[-1].tolist(), vectors.astype(np.float32))
            except (OSError, pa.ArrowException, KeyError, ValueError) as error:
                raise UserError(f"is damaged ({str(error).splitlines()[0]})", file=path) from None
        if not target.count:
            raise UserError("there is no vector", file=files[0])
        target.close()
    np.save(work / "rows.npy", np.concatenate(numbers))
    return [Part(Path("vectors.npy"), target.count)], target.dim
