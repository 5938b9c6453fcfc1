"""The one exception for what the user can mend: bad input or a bad configuration."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from typing import Any

_LONGEST_VALUE = 120
_FEW = 8
"""Names that a line has room for."""


class UserError(Exception):
    """Bad input or configuration. Its text is one line: ``FILE:ROW: message (key=value). Fix: fix``.

    The command line prints that line as ``embedlab: ...`` and exits with status 2.

    Args:
        message: what is wrong, as a clause without a full stop.
        fix: what to write or do instead.
        file: the file at fault.
        row: the row in it, counted from 1 as an editor does.
        key: the configuration key at fault, as it is written on the command line (``pooling.n``).
        value: what was given for ``key``; long values are shortened.
        index: of the text at fault among those that were given, by whose source the caller puts file and row in.
    """

    def __init__(
        self,
        message: str,
        *,
        fix: str,
        file: str | os.PathLike[str] | None = None,
        row: int | None = None,
        key: str | None = None,
        value: Any = None,
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
        return one_line(f"{text}. Fix: {self.fix}")

    def __reduce__(self) -> tuple[Any, ...]:  # an exception's own leaves keyword arguments out
        return partial(UserError, fix=self.fix), (self.message,), vars(self)


def nearest(given: Any, known: Iterable[Any], n: int = 1, cutoff: float = 0.6) -> list[str]:
    """Of the names that are known those that one resembles, best first; case and the kind of dash do not count.

    Args:
        given: a name that is not known, as a slip of the pen.
        known: names.
        n: how many at most.
        cutoff: from which likeness on (`difflib.get_close_matches`).
    """
    plain = {_plain(name): str(name) for name in known}
    return [plain[name] for name in get_close_matches(_plain(given), plain, n=n, cutoff=cutoff)]


def one_of(given: Any, known: Iterable[Any], start: str = "") -> str:
    """The fix for a name that is not known: those that it resembles, and all where they are few or it resembles none.

    Args:
        given: the name.
        known: names.
        start: what goes before each (``suite=``).
    """
    names = [str(name) for name in known]
    few = len(names) <= _FEW
    if near := nearest(given, names, n=1 if few else 3):
        of = f" (of {', '.join(names)})" if few and len(names) > 1 else ""
        return f"did you mean {' or '.join(start + name for name in near)}{of}?"
    return f"one of {', '.join(start + name for name in names)}"


def _plain(name: Any) -> str:
    return str(name).casefold().replace("_", "-")


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
