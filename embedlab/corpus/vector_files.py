"""Files of vectors, written a part at a time: whole at the end, or not there."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from embedlab.errors import UserError
from embedlab.files import check_writable, whole_file


class NpyFile:
    """One float32 array [rows, D]. Its header is written again at the end, when the number of rows is known."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.count = self.dim = self._header_size = 0
        self._stream = stream

    def add(self, rows: Sequence[int], vectors: NDArray[np.float32]) -> None:
        """Append `vectors` [n, D] of the input's `rows` [n]."""
        if not self._header_size:
            self.dim = vectors.shape[1]
            self._header_size = self._stream.write(self._header())
        self._stream.write(np.ascontiguousarray(vectors, dtype="<f4").data)
        self.count += len(rows)

    def _header(self) -> bytes:
        header = io.BytesIO()
        shape = (self.count, self.dim)
        np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": shape})
        return header.getvalue()

    def close(self) -> None:
        header = self._header()
        # numpy pads the header so that the first axis can grow (numpy.lib.format, GROWTH_AXIS_MAX_DIGITS).
        if self._header_size not in (0, len(header)):
            raise RuntimeError(f"the .npy header grew from {self._header_size} to {len(header)} bytes")
        self._stream.seek(0)
        self._stream.write(header)


class ParquetFile:
    """Columns `row` (int64: the line of the input), `vector` (list of D float32) and, where it is given, `text`."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.count = 0
        self._stream = stream
        self._writer: Any = None

    def add(
        self, rows: Sequence[int], vectors: NDArray[np.float32], texts: Sequence[str] | None = None
    ) -> None:
        """Append `vectors` [n, D] of the input's `rows` [n], with their texts from the first time on or never."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        dim = vectors.shape[1]
        if self._writer is None:
            schema = pa.schema([("row", pa.int64()), ("vector", pa.list_(pa.float32(), dim))])
            schema = schema if texts is None else schema.append(pa.field("text", pa.string()))
            self._writer = pq.ParquetWriter(self._stream, schema)
        flat = np.ascontiguousarray(vectors, dtype="<f4").reshape(-1)
        columns = [pa.array(rows, pa.int64()), pa.FixedSizeListArray.from_arrays(pa.array(flat), dim)]
        columns += [] if texts is None else [pa.array(texts, pa.string())]
        self._writer.write_table(pa.table(columns, schema=self._writer.schema))
        self.count += len(rows)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


VectorFile = NpyFile | ParquetFile
FORMATS: dict[str, type[VectorFile]] = {".npy": NpyFile, ".parquet": ParquetFile}


def vector_file(path: Path) -> AbstractContextManager[VectorFile]:
    """A context manager that gives the writer for `path`, by its suffix.

    What is added goes to a hidden file beside `path`, which takes the name of `path` when the block ends well and is
    removed when it does not: `path` never holds half of the vectors.

    Raises:
        UserError: a suffix that is not in `FORMATS`; on entering, a folder that is not there or not writable.
    """
    kind = FORMATS.get(path.suffix.lower())
    if kind is None:
        raise UserError("unknown kind of output", file=path, fix=f"end its name in {' or '.join(FORMATS)}")
    return _written(path, kind)


@contextmanager
def _written(path: Path, kind: type[VectorFile]) -> Iterator[VectorFile]:
    if not path.parent.is_dir():
        raise UserError("no such folder", file=path.parent, fix="make it, or write elsewhere")
    check_writable(path, key="output")
    with whole_file(path) as new, new.open("w+b") as stream:
        target = kind(stream)
        try:
            yield target
        finally:
            target.close()
