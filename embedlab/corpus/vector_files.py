"""Files of vectors, written a chunk at a time and put in place whole at the end."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from embedlab.errors import UserError
from embedlab.files import whole_file

FORMATS = (".npy", ".parquet")


class VectorFile(ABC):
    """A context manager around `add(rows, vectors)`.

    What is added goes to a hidden file beside `path`, which takes the name of `path` when the block ends well
    and is removed when it does not: `path` never holds half of the vectors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0
        self._exit = ExitStack()

    def __enter__(self) -> VectorFile:
        if not self.path.parent.is_dir():
            raise UserError("no such folder", file=self.path.parent, fix="make it, or write elsewhere")
        try:
            new = self._exit.enter_context(whole_file(self.path))
        except OSError as error:
            raise UserError(f"cannot be written ({error.strerror})", file=self.path) from error
        self._open(new.open("w+b"))
        self._exit.push(lambda kind, *_: self._close(failed=kind is not None))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.__exit__(kind, error, trace)

    def add(self, rows: Sequence[int], vectors: NDArray[np.float32]) -> None:
        """Appends `vectors` [n, D] of the input's `rows` [n]."""
        self._write(rows, np.ascontiguousarray(vectors, dtype="<f4"))
        self.count += len(rows)

    @abstractmethod
    def _open(self, stream: IO[bytes]) -> None: ...

    @abstractmethod
    def _write(self, rows: Sequence[int], vectors: NDArray[np.float32]) -> None: ...

    @abstractmethod
    def _close(self, failed: bool) -> None: ...


class NpyFile(VectorFile):
    """One float32 array [rows, D]. Its header is written again at the end, when the number of rows is
    known."""

    _stream: IO[bytes]
    _header_size = 0
    _dim = 0

    def _open(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def _write(self, rows: Sequence[int], vectors: NDArray[np.float32]) -> None:
        if not self._header_size:
            self._dim = vectors.shape[1]
            self._header_size = self._stream.write(self._header())
        self._stream.write(vectors.data)

    def _header(self) -> bytes:
        header = io.BytesIO()
        shape = (self.count, self._dim)
        np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": shape})
        return header.getvalue()

    def _close(self, failed: bool) -> None:
        with self._stream:
            if failed:
                return
            header = self._header()
            # numpy pads the header so that the first axis can grow (numpy.lib.format,
            # GROWTH_AXIS_MAX_DIGITS).
            if self._header_size not in (0, len(header)):
                raise RuntimeError(f"the .npy header grew from {self._header_size} to {len(header)} bytes")
            self._stream.seek(0)
            self._stream.write(header)


class ParquetFile(VectorFile):
    """Columns `row` (int64: the line of the input) and `vector` (list of D float32)."""

    _stream: IO[bytes]
    _writer: Any = None

    def _open(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def _write(self, rows: Sequence[int], vectors: NDArray[np.float32]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        dim = vectors.shape[1]
        if self._writer is None:
            schema = pa.schema([("row", pa.int64()), ("vector", pa.list_(pa.float32(), dim))])
            self._writer = pq.ParquetWriter(self._stream, schema)
        column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), dim)
        self._writer.write_table(pa.table([pa.array(rows, pa.int64()), column], schema=self._writer.schema))

    def _close(self, failed: bool) -> None:
        if self._writer is not None:
            self._writer.close()
        self._stream.close()


def vector_file(path: Path) -> VectorFile:
    """The writer for `path`, by its suffix; UserError for one that is not in `FORMATS`."""
    match path.suffix.lower():
        case ".npy":
            return NpyFile(path)
        case ".parquet":
            return ParquetFile(path)
    raise UserError("unknown kind of output", file=path, fix=f"end its name in {' or '.join(FORMATS)}")
