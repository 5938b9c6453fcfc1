"""Files of texts read as one table, from any row on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

from embedlab.data.reader import FileReader
from embedlab.errors import UserError
from embedlab.files import sha256


class Line(NamedTuple):
    """A text.

    Attributes:
        row: of all files, counted from 0.
        text: the text.
        line: of its file, as an editor counts.
        reader: of its file.
    """

    row: int
    text: str
    line: int
    reader: FileReader

    def error(self, message: str, **more: Any) -> UserError:
        """A `UserError` that names file and line."""
        return self.reader.error(message, self.line, **more)


class Texts:
    """The texts of several files, one file after the other.

    Args:
        readers: of the files, each with the column of its texts.

    Attributes:
        row: rows up to the one that was read last.
    """

    def __init__(self, readers: Sequence[tuple[FileReader, str]]) -> None:
        self.readers = readers
        self._states = [_state(reader) for reader, _ in readers]
        self._counts: list[int | None] = [None] * len(readers)
        self._reading: FileReader | None = None
        self._bytes = 0  # of the files before it
        self.row = 0

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(reader.size for reader, _ in self.readers)

    @property
    def position(self) -> float:
        """How much of `size` has been read or passed over."""
        return self._bytes + self._reading.position if self._reading else self._bytes

    @property
    def expected(self) -> float:
        """Rows of all files, as far as those read so far tell."""
        return self.row / self.position * self.size if self.position else 0.0

    def count(self) -> int:
        """The number of texts; known where they have been read to their end."""
        return sum(self._count(number) for number in range(len(self.readers)))

    def lines(self, start: int = 0) -> Iterator[Line]:
        """Every text from row `start` on."""
        first, self._bytes = 0, 0  # first: row of a file
        for number, (reader, column) in enumerate(self.readers):
            if first >= start or first + self._count(number) > start:
                self._reading = reader
                row = max(first, start)
                for line, text in reader.texts(column, row - first):
                    row = self.row = row + 1
                    yield Line(row - 1, text, line, reader)
                self._counts[number], self._reading = row - first, None
            first += self._count(number)
            self._bytes += reader.size

    def parts(self, rows: int, numbers: Iterable[int]) -> Iterator[tuple[int, Iterator[Line]]]:
        """Parts of so many texts each, those of `numbers`, which increase, as far as the files reach.

        Returns:
            Number and texts of a part, which are to be read to their end before the next one.
        """
        at, stream = 0, self.lines()
        for number in numbers:
            start = number * rows
            if start > at:
                if all(reader.quick for reader, _ in self.readers):
                    stream = self.lines(start)
                else:
                    next(islice(stream, start - at, start - at), None)
            first = next(stream, None)
            if first is None:
                return
            yield number, _chain(first, islice(stream, rows - 1))
            at = start + rows

    def of_vectors(self, rows: int, numbers: Iterable[int] | None, first: int) -> Iterator[str]:
        """A text a vector: every one, or where there are more texts than vectors, those of the vectors' numbers.

        Args:
            rows: vectors.
            numbers: of them, increasing: lines less `first`, or with `first` 0 rows; None: they have none.
            first: see there.
        """
        if numbers is None or self.count() == rows:
            yield from (line.text for line in self.lines())
            return
        wanted = map(int, numbers)
        number = next(wanted, None)
        for line in self.lines():
            if (line.line - first if first else line.row) == number:
                yield line.text
                number = next(wanted, None)

    def check_unchanged(self) -> None:
        """UserError where a file is no longer the one that was opened."""
        for (reader, _), state in zip(self.readers, self._states, strict=True):
            if _state(reader) != state:
                raise reader.error("changed while it was read", fix="encode it once nobody writes to it")

    def _count(self, number: int) -> int:
        found = self._counts[number]
        if found is None:
            reader, column = self.readers[number]
            found = self._counts[number] = reader.count(column)
        return found

    def identities(self, by: str) -> list[dict[str, Any]]:
        """The ``files`` of a manifest.

        Args:
            by: ``sha256``, or ``stat``, which does not read the files.
        """
        found = []
        for reader, column in self.readers:
            path, status = reader.path, reader.path.stat()
            content = {"modified": status.st_mtime_ns} if by == "stat" else {"sha256": sha256(path)}
            names: dict[str, Any] = {
                "path": str(path.resolve()),
                "column": None if reader.columns is None else column,
            }
            if column.isdecimal() and reader.has_header:  # else it is a place
                names["header"] = True
            found.append({**names, "bytes": status.st_size, **content})
        return found


def _state(reader: FileReader) -> tuple[int, int] | None:
    try:
        status = reader.path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _chain(first: Line, rest: Iterable[Line]) -> Iterator[Line]:
    yield first
    yield from rest


@contextmanager
def placing(line_of: Callable[[int], Line]) -> Iterator[None]:
    """Puts file and line into an error about a text, which is known by its place among those that were given."""
    try:
        yield
    except UserError as error:
        if error.index is not None:
            line = line_of(error.index)
            error.file, error.row = line.reader.name, line.line
        raise
