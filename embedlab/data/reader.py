"""What every reader of a table has: names, rows, errors; and how lines come out of plain and compressed files."""

from __future__ import annotations

import bz2
import codecs
import gzip
import lzma
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any

from embedlab.errors import UserError
from embedlab.files import sha256

Values = tuple[Any, ...]
OPENERS: dict[str, Callable[[IO[bytes]], Any]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw, mode="rb"),
    ".xz": lambda raw: lzma.open(raw, "rb"),  # noqa: SIM115
    ".bz2": lambda raw: bz2.open(raw, "rb"),  # noqa: SIM115
}
LONGEST_LINE = 1 << 25
_EXPANSION = 100  # times its size that a compressed file may hold: text has 3 to 10 times, a bomb thousands
_UNEXPANDED = 1 << 26  # bytes that it may hold in any case
_LONGEST_NAME = 40
_MOST_NAMES = 40
_EVERY = 64  # rows between two looks at the position in the file


@dataclass(frozen=True)
class Layout:
    """What is known of a table before its first line is read.

    Attributes:
        header: whether the first line of a .csv or .tsv file names its columns. None: it does, but where the columns
            are asked for by their place (0, 1, ...), and where it has one field that is no name known here or asked
            for.
        asked: names of columns that are asked for.
        known: usual names of columns -> the setting that reads a table with them.
        fix: how a column is named, for messages.
    """

    header: bool | None = None
    asked: Collection[str] = ()
    known: Mapping[str, str] = field(
        default_factory=lambda: dict.fromkeys(("sentence", "text"), "column=NAME")
    )
    fix: str = "column=NAME, or column=0 without a header"

    @property
    def by_place(self) -> bool:
        return any(name.isdecimal() for name in self.asked)

    def names(self, text: str) -> bool:
        """Whether a text is the name of a column rather than a sentence."""
        return text in self.known or (text in self.asked and not text.isdecimal())


def in_words(names: Sequence[str]) -> str:
    """Names of columns, for messages; where there is no header, a whole text may stand for one."""
    short = [n if len(n) <= _LONGEST_NAME else f"{n[:_LONGEST_NAME]}…" for n in names[:_MOST_NAMES]]
    return ", ".join(short) + (", …" if len(names) > _MOST_NAMES else "")


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

    @abstractmethod
    def identity(self) -> str:
        """What tells its text from any other (for the cache key)."""

    @property
    @abstractmethod
    def columns(self) -> list[str] | None:
        """The names of the columns, in order; None where there is one column without a name."""

    def listed(self) -> str:
        """The columns in words, for messages."""
        return in_words(self.columns or ["one without a name"])

    @abstractmethod
    def rows(self, columns: Sequence[str]) -> Iterator[tuple[int, Values]]:
        """Row number and the values of `columns` (strings; None for a null), for every row."""

    quick = False
    """Whether `rows_from` and `count` need not read what they leave out row by row."""

    def rows_from(self, start: int, columns: Sequence[str]) -> Iterator[tuple[int, Values]]:
        """`rows` without the first `start`."""
        return islice(self.rows(columns), start, None)

    def count(self, column: str) -> int:
        """The number of rows."""
        return sum(1 for _ in self.rows([column]))

    def texts(self, column: str, start: int = 0) -> Iterator[tuple[int, str]]:
        """Row number and text of every row after the first `start`; a null is an empty text.

        Raises:
            UserError: a value that is no text.
        """
        for row, (value,) in self.rows_from(start, [column]):
            if value is not None and not isinstance(value, str):
                fix = "column=NAME of a column of texts"
                raise self.error(f"{value!r:.60} is not text", row, key="column", value=column, fix=fix)
            yield row, value or ""

    def error(self, message: str, row: int | None = None, *, fix: str, **more: Any) -> UserError:
        """A `UserError` that names this table."""
        return UserError(message, fix=fix, file=self.name, row=row, **more)


class FileReader(Reader):
    """A reader of a file at `path`."""

    def __init__(self, path: Path, layout: Layout | None = None) -> None:
        super().__init__(str(path), path.stat().st_size)
        self.path = path
        self.layout = layout or Layout()

    def identity(self) -> str:
        try:
            return "".join([sha256(self.path), *self.path.suffixes[-2:]])
        except OSError as bad:
            raise self._unreadable(bad) from None

    @property
    def has_header(self) -> bool:
        """Whether the first line names the columns, where it might as well be a row."""
        return False

    @property
    def packed(self) -> bool:
        """Whether the file is compressed."""
        return self.path.suffix.lower() in OPENERS

    def _lines(self, row: int = 0, held: int = 0) -> Generator[tuple[int, str]]:
        """Number and text of every line, without its line end, after so many lines that take so many bytes."""
        packed = self.packed
        try:
            with self.path.open("rb") as raw, _decompress(self.path, raw) as stream:
                if held:
                    raw.seek(held)
                for line in (
                    _byte_lines(stream) if not held else iter(partial(stream.readline, LONGEST_LINE), b"")
                ):
                    row += 1
                    held += len(line)
                    if row % _EVERY == 0:
                        self.position = raw.tell()
                    if len(line) >= LONGEST_LINE:
                        fix = "one text a line"
                        raise self.error(f"a line of more than {LONGEST_LINE >> 20} MiB", row, fix=fix)
                    if packed:
                        self.check_expansion(held, row)
                    try:
                        text = line.decode("utf-8")
                    except UnicodeDecodeError as bad:
                        raise self._not_utf8(line, bad.start, row) from None
                    if "\0" in text:
                        problem = "a NUL byte: the file is binary, damaged or UTF-16"
                        raise self.error(problem, row, fix="a file of UTF-8 text")
                    if row == 1:
                        text = text.removeprefix("\ufeff")
                    yield row, text.rstrip("\r\n")
                self.position = self.size
        except (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError) as bad:
            raise self._damaged(row, bad) from None
        except OSError as bad:
            if self.path.suffix == ".bz2" and bad.errno is None:
                raise self._damaged(row, bad) from None
            raise self._unreadable(bad) from None

    def check_expansion(self, held: int, row: int | None, packed: int | None = None) -> None:
        """UserError where the file, or `packed` bytes of it, holds so many bytes that it was made to fill a machine."""
        size = self.size if packed is None else packed
        if held > max(_UNEXPANDED, _EXPANSION * size):
            raise self.error(
                f"{size:,} compressed bytes hold more than {_EXPANSION} times as many",
                row,
                fix="unpack the file, if that is meant",
            )

    def _not_utf8(self, line: bytes, start: int, row: int) -> UserError:
        wide = row == 1 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        return self.error(
            f"not UTF-8: byte 0x{line[start]:02x} at place {start + 1} of the line",
            row,
            fix=f"convert the file to UTF-8, for example with iconv -f {'utf-16' if wide else 'latin1'} -t utf-8",
        )

    def _damaged(self, row: int, bad: Exception) -> UserError:
        after = f"after row {row}" if row else "before its first row"
        problem = f"the {self.path.suffix} file is truncated or damaged {after} ({bad})"
        plain = "" if row else f"; where it is not compressed, its name without {self.path.suffix}"
        return self.error(problem, fix=f"another copy of it{plain}")

    def _unreadable(self, bad: OSError) -> UserError:
        return self.error(f"cannot be read: {bad.strerror or bad}", fix="a file that you may read")

    def _empty(self) -> UserError:
        return self.error("the file is empty", fix="a file with a text, or a record, a line")


def _decompress(path: Path, raw: IO[bytes]) -> Any:
    opener = OPENERS.get(path.suffix.lower())
    return raw if opener is None else opener(raw)


def _byte_lines(stream: Any) -> Iterator[bytes]:
    """Lines that end in \\n; or in \\r, in a file that has no \\n but at its end."""
    line: bytes = stream.readline(LONGEST_LINE)
    following: bytes = stream.readline(LONGEST_LINE)
    if b"\r" in line.rstrip(b"\r\n") and not (line.endswith(b"\n") and following):
        rest, block = line, following
        while True:
            *lines, rest = (rest + block).split(b"\r")
            yield from lines
            block = stream.read(1 << 16)
            if not block or len(rest) >= LONGEST_LINE:
                break
        line, following = rest.rstrip(b"\n"), b""
    while line:
        yield line
        line, following = following, stream.readline(LONGEST_LINE)
