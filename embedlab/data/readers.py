"""Streaming readers of table-like files: each gives the row number and the asked columns, row by row.

Row numbers are those of an editor: the line on which the row starts, counted from 1, a header included (in
parquet, which has no lines, the row itself). Nothing is repaired on the way: what cannot be read ends in one
`UserError` with the file and the row.
"""

from __future__ import annotations

import csv
import json
import logging
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from embedlab.console import is_new
from embedlab.data.parquet import ParquetFile
from embedlab.data.reader import LONGEST_LINE, OPENERS, FileReader, Layout, Values, in_words
from embedlab.errors import UserError, one_line

log = logging.getLogger(__name__)
_BLOCK = 1 << 18  # bytes that are looked through for line ends at a time
_OBJECT = 'a JSON object a line, such as {"text": "a cat"}'
_LOOKED_AT = 20  # lines that show whether a .txt file is a table


def _warn(text: str) -> None:
    """Of a file that every rank opens, one does."""
    if log.isEnabledFor(logging.WARNING) and is_new(one_line(text)):
        log.warning("%s", one_line(text))


class TextFile(FileReader):
    """A text a line; the one column has no name, so that any name means it."""

    @cached_property
    def columns(self) -> None:  # type: ignore[override]
        """None.

        Raises:
            UserError: the lines are a table with tabs.
        """
        try:
            with closing(self._lines()) as lines:
                first = [line.split("\t") for _, line in islice(lines, _LOOKED_AT) if line]
        except UserError:  # of a row that may never be asked for
            return
        if len(first) > 1 and len(first[0]) > 1 and len({len(fields) for fields in first}) == 1:
            names, known = first[0], self.layout.known
            raise self.error(
                f"a .txt file has one text a line, and this is a table of {len(names)} columns parted by tabs"
                f" ({in_words(names)})",
                fix=f"call it .tsv, and {next((known[n] for n in names if n in known), self.layout.fix)}",
            )

    def rows(self, columns: Sequence[str]) -> Iterator[tuple[int, Values]]:
        if len(columns) != 1:
            raise self.error(
                f"a .txt file has one text a line, and {len(columns)} are needed ({', '.join(columns)})",
                fix="a .csv, .tsv, .jsonl or .parquet file with these columns",
            )
        _ = self.columns
        row = 0
        for row, line in self._lines():
            yield row, (line,)
        if row == 0:
            raise self._empty()

    @cached_property
    def quick(self) -> bool:  # type: ignore[override]
        """Where lines can be told by their ends alone: not in a compressed file, nor in one whose lines end in \\r."""
        if self.packed:
            return False
        with self.path.open("rb") as file:
            first, more = file.readline(LONGEST_LINE), file.read(1)
        return first.endswith(b"\n") and bool(more)

    def rows_from(self, start: int, columns: Sequence[str]) -> Iterator[tuple[int, Values]]:
        if not start or not self.quick:
            yield from super().rows_from(start, columns)
            return
        found = self._after(start)
        if found[0] == start:  # there may be a last line that does not end
            self._mark = found
        for row, line in self._lines(*found):
            yield row, (line,)

    def count(self, column: str) -> int:
        if not self.quick:
            return super().count(column)
        rows, end = self._after(None)
        with self.path.open("rb") as file:
            file.seek(end - 1)
            return rows + (file.read() != b"\n")

    _mark = (0, 0)
    """Lines that have been passed over, and their bytes: the next ones are counted from there."""

    def _after(self, lines: int | None) -> tuple[int, int]:
        """So many lines of the file (None: all that end) and the bytes that they take; fewer where there are fewer."""
        row, at = self._mark if lines is None or self._mark[0] <= lines else (0, 0)
        with self.path.open("rb") as file:
            file.seek(at)
            while block := file.read(_BLOCK):
                found = block.count(b"\n")
                if lines is not None and row + found >= lines:
                    end = -1
                    for _ in range(lines - row):
                        end = block.index(b"\n", end + 1)
                    return lines, at + end + 1
                row, at = row + found, at + len(block)
        return row, at


class DelimitedFile(FileReader):
    """A record a line: .tsv without any quoting, .csv with RFC 4180 quotes; `Layout` says when there is a header.

    Without a header the columns are called 0, 1, ... by their place, and a single one has no name.
    """

    @cached_property
    def _head(self) -> tuple[list[str], bool]:
        """The first record, and whether it is a header."""
        with closing(self._records()) as records:
            first = next(records, None)
        if first is None:
            raise self._empty()
        names, layout = first[1] or [""], self.layout
        named = any(map(layout.names, names)) or (len(names) > 1 and not layout.by_place)
        if layout.header is not None:
            named = layout.header
        elif not named:
            told = "header=true if it names the column"
            if layout.by_place:
                told = "if it names the columns, ask for one by its name; if not, header=false silences this"
            _warn(f"{self.name}: its first line is read as text; {told}")
        return names, named

    @property
    def has_header(self) -> bool:
        return self._head[1]

    @property
    def columns(self) -> list[str] | None:
        names, named = self._head
        if not named:
            return None if len(names) == 1 else [str(i) for i in range(len(names))]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            fix = "a name of its own for each column"
            raise self.error(f"the header names {', '.join(sorted(twice))} twice", 1, fix=fix)
        return names

    def identity(self) -> str:
        _, named = self._head
        usual = named and self._delimiter == self._usual
        return super().identity() + ("" if usual else f" {self._delimiter} {named}")

    def rows(self, columns: Sequence[str]) -> Iterator[tuple[int, Values]]:
        header = self.columns
        if header is None and len(columns) != 1:
            raise self.error(
                f"one column without a name, and {len(columns)} are needed ({', '.join(columns)})",
                fix="a header line with these names, and records of as many fields",
            )
        names, named = self._head
        places = [0] if header is None else [header.index(name) for name in columns]
        records = self._records()
        if named:
            next(records)
        row = None
        for row, record in records:
            if len(record) != len(names):
                if not any(record):  # a blank line: a row of empty texts, whatever the number of columns
                    yield row, ("",) * len(places)
                    continue
                first = "the header" if named else "the first line"
                told = f"{len(record)} fields where {first} has {len(names)}"
                raise self.error(told, row, fix=self._field_fix)
            yield row, tuple([record[place] for place in places])
        if row is None:
            fix = "rows below the header, or header=false if the line is a text"
            raise self.error("the file has a header and no rows", fix=fix)

    @property
    def _field_fix(self) -> str:
        if self._usual == self._delimiter == "\t":
            return "no tabs within a text; or a .csv file, whose quotes hold them"
        return f"as many in each row; a text with {self._delimiter!r} in it stands in quotes"

    @property
    def _usual(self) -> str:
        return "," if ".csv" in map(str.lower, self.path.suffixes) else "\t"

    @cached_property
    def _delimiter(self) -> str:
        """What parts the fields: of files that are called something else, too."""
        with closing(self._lines()) as lines:
            line = next(lines, (1, ""))[1]
        for delimiter in (self._usual, "\t", ",", ";", "|"):
            fields = [text.strip().strip('"') for text in line.split(delimiter)]
            names = [text for text in fields if self.layout.names(text)]
            sure = delimiter in (self._usual, "\t") or (names and not any(" " in text for text in fields))
            if len(fields) > 1 and sure:
                if delimiter != self._usual:
                    _warn(f"{self.name}: its columns are parted by {delimiter!r}, and are read so")
                return delimiter
        return self._usual

    def _records(self) -> Generator[tuple[int, list[str]]]:
        if self._usual == self._delimiter == "\t":
            for row, line in self._lines():
                yield row, line.split("\t")
            return
        # The default limit (131,072) would stop at a long row before `max_chars` can say what to do with it.
        csv.field_size_limit(max(csv.field_size_limit(), LONGEST_LINE))
        lines = (line + "\n" for _, line in self._lines())
        reader = csv.reader(lines, strict=True, delimiter=self._delimiter)
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
        raise self._empty()

    def rows(self, columns: Sequence[str]) -> Iterator[tuple[int, Values]]:
        row = 0
        for row, record in self.records():
            try:
                yield row, tuple([record[name] for name in columns])
            except KeyError as missing:
                told = f"no {missing} in this row, which has: {', '.join(record)}"
                raise self.error(
                    told, row, fix="the same keys in every row, null where there is none"
                ) from None
        if row == 0:
            raise self._empty()

    def records(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Row number and object of every line that is not blank.

        Raises:
            UserError: a line that is no JSON object, is nested too deep, or holds half of a character.
        """
        for row, line in self._lines():
            if not line or line.isspace():
                continue
            try:
                record = json.loads(line)
                if not isinstance(record, dict):
                    told = f"a JSON object is needed, and this is a {type(record).__name__}"
                    raise self.error(told, row, fix=_OBJECT)
                if "\\u" in line:
                    json.dumps(record, ensure_ascii=False).encode()
                if any(isinstance(value, dict) for value in record.values()):
                    record = dict(_flat(record))
            except UnicodeEncodeError as bad:
                half = f"\\u{ord(bad.object[bad.start]):04x}"
                told = f"{half} is half of a character (a surrogate without its other)"
                raise self.error(told, row, fix="the whole character, or leave it out") from None
            except RecursionError:
                raise self.error("JSON that is nested too deep", row, fix=_OBJECT) from None
            except ValueError as bad:
                raise self.error(f"not JSON ({bad})", row, fix=_OBJECT) from None
            yield row, record


_KINDS: dict[str, type[FileReader]] = {
    ".txt": TextFile,
    ".csv": DelimitedFile,
    ".tsv": DelimitedFile,
    ".jsonl": JsonLines,
    ".parquet": ParquetFile,
}


def open_reader(path: Path, layout: Layout | None = None) -> FileReader:
    """The reader for a file, by its name.

    Args:
        path: of the file.
        layout: what is known of its columns.

    Raises:
        UserError: a name that says no known format.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packed = suffixes[-1:] and suffixes[-1] in OPENERS
    kind = "".join(suffixes[-2:-1] if packed else suffixes[-1:])
    if kind not in _KINDS or (packed and kind == ".parquet"):
        raise UserError(
            "unknown kind of file",
            file=path,
            fix=f"one of {', '.join(_KINDS)}; all but .parquet also with {', '.join(OPENERS)} after it",
        )
    return _KINDS[kind](path, layout)


def _flat(record: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in record.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
