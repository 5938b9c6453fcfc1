"""The one exception for what the user can mend: bad input or a bad configuration."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LONGEST_VALUE = 120


class UserError(Exception):
    """Bad input or configuration. Its text is one line: ``FILE:ROW: message (key=value). Fix: fix``.

    The command line prints that line as ``embedlab: ...`` and exits with status 2.

    Args:
        message: what is wrong, as a clause without a full stop.
        file: the file at fault.
        row: the row in it, counted from 1 as an editor does.
        key: the configuration key at fault, as it is written on the command line (``pooling.n``).
        value: what was given for ``key``; long values are shortened.
        fix: what to write instead.
        index: of the text at fault among those that were given, by whose source the caller puts file and row in.
    """

    def __init__(
        self,
        message: str,
        *,
        file: str | os.PathLike[str] | None = None,
        row: int | None = None,
        key: str | None = None,
        value: Any = None,
        fix: str | None = None,
        index: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.file = None if file is None else os.fspath(file)
        self.row = row
        self.key = key
        self.value = value
        self.fix = fix
        self.index = index

    def __str__(self) -> str:
        where = ":".join(str(part) for part in (self.file, self.row) if part is not None)
        text = f"{where}: {self.message}" if where else self.message
        text = text.rstrip().rstrip(".")
        if self.key is not None:
            text += f" ({self.key})" if self.value is None else f" ({self.key}={_shorten(self.value)})"
        if self.fix:
            text += f". Fix: {self.fix}"
        return one_line(text)


@contextmanager
def blamed_on(key: str, value: Any = None, fix: str | None = None) -> Iterator[None]:
    """A mistake that is found inside is of this key, by whatever key the code in there knows it.

    Args:
        key: on the command line.
        value: given for it; None: as the code says.
        fix: in place of the code's, where that names keys of another place.
    """
    try:
        yield
    except UserError as error:
        error.key = key
        error.value = error.value if value is None else value
        error.fix = fix or error.fix
        raise


def _shorten(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}… ({len(text)} characters)"


def one_line(text: str) -> str:
    """``text`` with every run of white space as one space and every control character escaped."""
    return printable(" ".join(text.split()))


_JOINERS = "\u200c\u200d"
"""Of scripts and emoji; they have no effect beyond the letters beside them."""


def printable(text: str) -> str:
    """``text`` with every control character (a terminal's escapes, changes of direction) and half surrogate escaped."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in _JOINERS or unicodedata.category(c) == "Zs" else repr(c)[1:-1]
        for c in text
    )
