"""Streaming readers of table-like files: each gives the row number and the asked columns, row by row.

Row numbers are those of an editor: the line on which the row starts, counted from 1, a header included (in
parquet, which has no lines, the row itself). Nothing is repaired on the way: what cannot be read ends in one
`UserError` with the file and the row.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from embedlab.errors import UserError

Values = tuple[Any, ...]
FORMATS = (".txt", ".csv", ".tsv", ".jsonl", ".parquet")
_OPENERS: dict[str, Callable[[IO[bytes]], Any]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw, mode="rb"),
    ".xz": lambda raw: lzma.open(raw, "rb"),  # noqa: SIM115
    ".bz2": lambda raw: bz2.open(raw, "rb"),  # noqa: SIM115
}
_LONGEST_LINE = 1 << 26
_LONGEST_NAME = 40
_MOST_NAMES = 40
_EVERY = 1024  # rows between two looks at the position in the file


class Reader(ABC):
    """One table of texts: a file, or one configuration of a hub data set.

    Attributes:
        name: what messages and reports call it; for a file, its path.
        size: bytes of the file (elsewhere any measure of the whole), for a progress bar.
        position: how much of `size` has been read.
    """

    def __init__(self, name: str, size: int = 0) -> None:
        self.name = name
        self.size = size
        self.position = 0

    @property
    @abstractmethod
    def columns(self) -> list[str] | None:
        """The names of the columns, in order; None where there is one column without a name."""

    def listed(self) -> str:
        """The columns in words, for messages; a file without a header may have a whole text there."""
        names = self.columns or ["one without a name"]
        short = [
            name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}…" for name in names[:_MOST_NAMES]
        ]
        return ", ".join(short) + (", …" if len(names) > _MOST_NAMES else "")

    @abstractmethod
    def rows(self, columns: Sequence[str]) -> Iterator[tuple[int, Values]]:
        """Row number and the values of `columns` (strings; None for a null), for every row."""

    def error(self, message: str, row: int | None = None, **more: Any) -> UserError:
        """A `UserError` that names this table."""
        return UserError(message, file=self.name, row=row, **more)


class FileReader(Reader):
    """A reader of a file at `path`."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), path.stat().st_size)
        self.path = path

    def _lines(self) -> Iterator[tuple[int, str]]:
        """Number and text of every line, without its line end."""
        row = 0
        try:
            with self.path.open("rb") as raw, _decompress(self.path, raw) as stream:
                readline = stream.readline
                while line := readline(_LONGEST_LINE):
                    row += 1
                    if row % _EVERY == 0:
                        self.position = raw.tell()
                    if len(line) == _LONGEST_LINE:
                        raise self.error(f"a line of more than {_LONGEST_LINE >> 20} MiB", row)
                    try:
                        text = line.decode("utf-8")
                    except UnicodeDecodeError as bad:
                        raise self.error(
                            f"not UTF-8: byte 0x{line[bad.start]:02x} at place {bad.start + 1} of the line",
                            row,
                            fix="convert the file to UTF-8, for example with iconv -f latin1 -t utf-8",
                        ) from None
                    if "\0" in text:
                        raise self.error("a NUL byte: the file is binary, damaged or UTF-16", row)
                    if row == 1:
                        text = text.removeprefix("\ufeff")
                    yield row, text.rstrip("\r\n")
        except (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError) as bad:
            raise self._damaged(row, bad) from None
        except OSError as bad:
            if self.path.suffix == ".bz2" and bad.errno is None:
                raise self._damaged(row, bad) from None
            raise self.error(f"cannot be read: {bad.strerror or bad}") from None

    def _damaged(self, row: int, bad: Exception) -> UserError:
        after = f"after row {row}" if row else "before its first row"
        return self.error(f"the {self.path.suffix} file is truncated or damaged {after} ({bad})")


class TextFile(FileReader):
    """A text a line; the one column has no name, so that any name means it."""

    @property
    def columns(self) -> None:
        return None

    def rows(self, columns: Sequence[str]) -> Iterator[tuple[int, Values]]:
        if len(columns) != 1:
            raise self.error(
                f"a .txt file has one text a line, and {len(columns)} are needed ({', '.join(columns)})",
                fix="a .csv, .tsv, .jsonl or .parquet file with these columns",
            )
        row = 0
        for row, line in self._lines():
            yield row, (line,)
        if row == 0:
            raise self.error("the file is empty")


class DelimitedFile(FileReader):
    """A header line, then a record a line: .tsv without any quoting, .csv with RFC 4180 quotes."""

    def __init__(self, path: Path, quoted: bool) -> None:
        super().__init__(path)
        self.quoted = quoted
        self._header: list[str] | None = None

    @property
    def columns(self) -> list[str]:
        if self._header is None:
            records = self._records()
            try:
                self._header = next(records)[1]
            except StopIteration:
                raise self.error("the file is empty") from None
            finally:
                records.close()
            twice = {name for name in self._header if self._header.count(name) > 1}
            if twice:
                raise self.error(f"the header names {', '.join(sorted(twice))} twice", 1)
        return self._header

    def rows(self, columns: Sequence[str]) -> Iterator[tuple[int, Values]]:
        header = self.columns
        places = [header.index(name) for name in columns]
        records = self._records()
        next(records)
        row = None
        for row, record in records:
            if len(record) != len(header):
                if not any(record):  # a blank line: a row of empty texts, whatever the number of columns
                    yield row, ("",) * len(places)
                    continue
                raise self.error(f"{len(record)} fields where the header has {len(header)}", row)
            yield row, tuple([record[place] for place in places])
        if row is None:
            raise self.error("the file has a header and no rows")

    def _records(self) -> Generator[tuple[int, list[str]]]:
        if not self.quoted:
            for row, line in self._lines():
                yield row, line.split("\t")
            return
        # The default limit (131,072) would stop at a long row before `max_chars` can say what to do with it.
        csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_LINE))
        reader = csv.reader((line + "\n" for _, line in self._lines()), strict=True)
        start = 1
        try:
            for record in reader:
                yield start, record
                start = reader.line_num + 1
        except csv.Error as bad:
            raise self.error(f"not a well-formed csv record ({bad})", start, fix="check its quotes") from None


class JsonLines(FileReader):
    """A JSON object a line; the first one names the columns. Nested objects are named ``outer.inner``."""

    @property
    def columns(self) -> list[str]:
        for _, record in self.records():
            return list(record)
        raise self.error("the file is empty")

    def rows(self, columns: Sequence[str]) -> Iterator[tuple[int, Values]]:
        row = 0
        for row, record in self.records():
            try:
                yield row, tuple([record[name] for name in columns])
            except KeyError as missing:
                raise self.error(f"no {missing} in this row, which has: {', '.join(record)}", row) from None
        if row == 0:
            raise self.error("the file is empty")

    def records(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Row number and object of every line that is not blank."""
        for row, line in self._lines():
            if not line or line.isspace():
                continue
            try:
                record = json.loads(line)
            except ValueError as bad:
                raise self.error(f"not JSON ({bad})", row) from None
            if not isinstance(record, dict):
                raise self.error(f"a JSON object is needed, and this is a {type(record).__name__}", row)
            if "\\u" in line:
                try:
                    json.dumps(record, ensure_ascii=False).encode()
                except UnicodeEncodeError as bad:
                    half = f"\\u{ord(bad.object[bad.start]):04x}"
                    raise self.error(
                        f"{half} is half of a character (a surrogate without its other)", row
                    ) from None
            if any(isinstance(value, dict) for value in record.values()):
                record = dict(_flat(record))
            yield row, record


class ParquetFile(FileReader):
    """A parquet table; columns of structs are named ``outer.inner``."""

    @property
    def columns(self) -> list[str]:
        with self._open() as file:
            return _flat_schema(file.schema_arrow)

    def rows(self, columns: Sequence[str]) -> Iterator[tuple[int, Values]]:
        import pyarrow as pa

        with self._open() as file:
            row = 0
            tops = list(dict.fromkeys(name.split(".")[0] for name in columns))
            names = file.schema_arrow.names
            tops = [name for name in names if name in tops or name in columns]
            try:
                for batch in file.iter_batches(batch_size=_EVERY, columns=tops):
                    table = pa.Table.from_batches([batch]).flatten()
                    texts = [table.column(name).to_pylist() for name in columns]
                    for values in zip(*texts, strict=True):
                        row += 1
                        yield row, values
                    self.position = self.size * row // max(1, file.metadata.num_rows)
            except UnicodeDecodeError:
                raise self.error(f"a text that is not UTF-8 in rows {row + 1} to {row + _EVERY}") from None
            except (pa.ArrowException, OSError) as bad:
                raise self.error(f"the parquet file is damaged after row {row} ({bad})") from None
        if row == 0:
            raise self.error("the file has no rows")

    def _open(self) -> Any:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            if self.size == 0:
                raise self.error("the file is empty")
            return pq.ParquetFile(self.path)
        except (pa.ArrowException, OSError) as bad:
            raise self.error(f"not a readable parquet file ({bad})") from None


def open_reader(path: Path) -> FileReader:
    """The reader for a file, by its name.

    Raises:
        UserError: a name that says no known format.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packed = suffixes[-1:] and suffixes[-1] in _OPENERS
    kind = suffixes[-2:-1] if packed else suffixes[-1:]
    match kind:
        case [".txt"]:
            return TextFile(path)
        case [".csv"]:
            return DelimitedFile(path, quoted=True)
        case [".tsv"]:
            return DelimitedFile(path, quoted=False)
        case [".jsonl"]:
            return JsonLines(path)
        case [".parquet"] if not packed:
            return ParquetFile(path)
    raise UserError(
        "unknown kind of file",
        file=path,
        fix=f"one of {', '.join(FORMATS)}; all but .parquet also with {', '.join(_OPENERS)} after it",
    )


def _decompress(path: Path, raw: IO[bytes]) -> Any:
    opener = _OPENERS.get(path.suffix.lower())
    return raw if opener is None else opener(raw)


def _flat(record: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in record.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _flat_schema(schema: Any) -> list[str]:
    import pyarrow as pa

    names = []
    for column in schema:
        if pa.types.is_struct(column.type):
            names += [f"{column.name}.{column.type.field(i).name}" for i in range(column.type.num_fields)]
        else:
            names.append(column.name)
    return names
