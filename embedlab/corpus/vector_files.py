"""Files of vectors, written a part at a time: whole at the end, or not there."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from embedlab.encoders.codes import RANGES, Codes
from embedlab.errors import UserError
from embedlab.files import check_writable, whole_file, write_array, write_header, write_new

_BLOCK = 8192


def stored(vectors: NDArray[np.float32], codes: Codes) -> NDArray[Any]:
    """What a file holds of vectors [n, D], [n, `codes.width`]: the one place where fp32 rows become stored ones.

    Raises:
        UserError: a row (its `index`) that is not finite, or not in this store.
    """
    with np.errstate(over="ignore"):
        found: NDArray[Any] = codes.encode(vectors)
    if codes.store == "float16" and not (finite := np.isfinite(found).all(axis=1)).all():
        problem, fix = "its vector is beyond the range of float16", "normalize=true, or store=float32"
        raise UserError(problem, key="store", value="float16", fix=fix, index=int(np.flatnonzero(~finite)[0]))
    return found


class _Writer(ABC):
    """Rows of vectors into a stream.

    Args:
        stream: open for writing, at its start.
        codes: how they are stored; None: as float32 of whatever width comes first.

    Attributes:
        count: rows so far.
        codes: from the first row on.
    """

    def __init__(self, stream: IO[bytes], codes: Codes | None = None) -> None:
        self.count = 0
        self._stream = stream
        self.codes = codes
        if codes is not None:
            self._begin(codes)

    @property
    def dim(self) -> int:
        """D, features of a vector; 0 while it is not known."""
        return 0 if self.codes is None else self.codes.dim

    def add(self, rows: Sequence[int], vectors: NDArray[np.float32]) -> None:
        """Append `vectors` [n, D] of the input's `rows` [n]."""
        if self.codes is None:
            self.codes = Codes("float32", vectors.shape[1])
            self._begin(self.codes)
        self.append(rows, stored(vectors, self.codes))

    def append(self, rows: Sequence[int], codes: NDArray[Any]) -> None:
        """Append what is stored of them, [n, `codes.width`]."""
        self._append(rows, codes)
        self.count += len(rows)

    @abstractmethod
    def _begin(self, codes: Codes) -> None: ...
    @abstractmethod
    def _append(self, rows: Sequence[int], codes: NDArray[Any]) -> None: ...
    @abstractmethod
    def close(self) -> None:
        """Write what a reader needs besides the rows."""


class NpyFile(_Writer):
    """One array [rows, width]. Its header is written again at the end, when the number of rows is known."""

    _header_size = 0

    def _begin(self, codes: Codes) -> None:
        self._header_size = self._stream.write(self._header())

    def _append(self, rows: Sequence[int], codes: NDArray[Any]) -> None:
        self._stream.write(np.ascontiguousarray(codes).data)

    def _header(self) -> bytes:
        header = io.BytesIO()
        assert self.codes is not None
        write_header(header, self.codes.dtype, (self.count, self.codes.width))
        return header.getvalue()

    def close(self) -> None:
        if self.codes is None:
            return
        header = self._header()
        # numpy pads the header so that the first axis can grow (numpy.lib.format, GROWTH_AXIS_MAX_DIGITS).
        if self._header_size != len(header):
            raise RuntimeError(f"the .npy header grew from {self._header_size} to {len(header)} bytes")
        self._stream.seek(0)
        self._stream.write(header)


class ParquetFile(_Writer):
    """Columns `row` (int64: of the input), `vector` (list of `Codes.width` numbers) and, where `texts`, `text`."""

    _writer: Any = None

    texts: Sequence[str] | None = None
    """Of the rows that are added next; a file has them of all rows or of none."""

    def _begin(self, codes: Codes) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        vector = pa.list_(pa.from_numpy_dtype(codes.dtype), codes.width)
        schema = pa.schema([("row", pa.int64()), ("vector", vector)])
        schema = schema if self.texts is None else schema.append(pa.field("text", pa.string()))
        # Neither a dictionary nor compression makes such numbers smaller: the dictionary took half as much again.
        self._writer = pq.ParquetWriter(self._stream, schema, use_dictionary=False, compression="none")

    def _append(self, rows: Sequence[int], codes: NDArray[Any]) -> None:
        import pyarrow as pa

        flat = pa.array(np.ascontiguousarray(codes).reshape(-1))
        columns = [pa.array(rows, pa.int64()), pa.FixedSizeListArray.from_arrays(flat, codes.shape[1])]
        columns += [] if self.texts is None else [pa.array(self.texts, pa.string())]
        self._writer.write_table(pa.table(columns, schema=self._writer.schema))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def read_vectors(path: Path) -> Iterator[tuple[Sequence[int], NDArray[Any]]]:
    """Blocks of what a file of vectors holds, as they were written: rows [n], and codes [n, width].

    The rows of a .npy file are counted from 0, and a block has 8,192 of them.
    """
    if path.suffix.lower() == ".npy":
        codes = np.load(path, mmap_mode="r")
        for at in range(0, len(codes), _BLOCK):
            yield range(at, min(at + _BLOCK, len(codes))), codes[at : at + _BLOCK]
        return
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            table = file.read_row_group(group)
            column = table.column("vector").combine_chunks()
            values = column.flatten().to_numpy().reshape(len(column), column.type.list_size)
            yield table.column("row").to_numpy(), values


VectorFile = NpyFile | ParquetFile
FORMATS: dict[str, type[VectorFile]] = {".npy": NpyFile, ".parquet": ParquetFile}


def vector_file(
    path: Path, codes: Codes | None = None, ranges: bool = False
) -> AbstractContextManager[VectorFile]:
    """A context manager that gives the writer for `path`, by its suffix.

    What is added goes to a hidden file beside `path`, which takes the name of `path` when the block ends well and is
    removed when it does not: `path` never holds half of the vectors.

    Args:
        path: of the file.
        codes: how vectors are stored; None: as float32 of whatever width comes first.
        ranges: write `RANGES` beside it, where the codes are decoded by any.

    Raises:
        UserError: a suffix that is not in `FORMATS`; on entering, a folder that is not there or not writable, or holds
            other ranges.
    """
    kind = FORMATS.get(path.suffix.lower())
    if kind is None:
        raise UserError("unknown kind of output", file=path, fix=f"end its name in {' or '.join(FORMATS)}")
    return _written(path, kind, codes, ranges and codes is not None and codes.calibrated)


def write_ranges(path: Path, codes: Codes) -> None:
    """Write the ranges by which codes are decoded, or see that the same ones stand there.

    Raises:
        UserError: others do.
    """
    assert codes.ranges is not None
    content = io.BytesIO()
    write_array(content, codes.ranges.astype("<f4"))
    if not write_new(path, content.getvalue()) and path.read_bytes() != content.getvalue():
        fix = "write to another folder, calibration= of this file, or remove it where no other codes need it"
        raise UserError("holds other ranges than these vectors have", file=path, fix=fix)


def read_ranges(path: Path, dim: int, fix: str) -> NDArray[np.float32]:
    """The ranges [2, D] that `write_ranges` wrote for vectors of `dim` features.

    Raises:
        UserError: the file is not there or not whole, or holds something else.
    """
    try:
        ranges: NDArray[np.float32] = np.load(path)
        if ranges.shape != (2, dim) or ranges.dtype.kind != "f" or not (ranges[0] <= ranges[1]).all():
            raise ValueError(
                f"an array {ranges.shape} in place of the least and largest values of {dim} features"
            )
    except (OSError, ValueError, EOFError, SyntaxError, TypeError) as error:
        raise UserError(f"is damaged ({error})", file=path, fix=fix) from None
    return ranges


def check_place(path: Path) -> None:
    """UserError where the folder of `path` is not there or not writable."""
    if not path.parent.is_dir():
        if path.parent.exists():
            raise UserError(
                "is a file", file=path.parent, key="output", value=path, fix="a place in a folder"
            )
        raise UserError("no such folder", file=path.parent, fix="make it, or write elsewhere")
    check_writable(path, key="output")


@contextmanager
def _written(path: Path, kind: type[VectorFile], codes: Codes | None, ranges: bool) -> Iterator[VectorFile]:
    check_place(path)
    beside = path.with_name(RANGES)
    if ranges and codes and beside.exists():
        write_ranges(beside, codes)
    with whole_file(path) as new:
        with new.open("w+b") as stream:
            target = kind(stream, codes)
            try:
                yield target
            finally:
                target.close()
        if ranges and codes:
            write_ranges(beside, codes)
