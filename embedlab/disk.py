"""A disk that takes no more, by the name that the system has for it: torch and safetensors use words of their own."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT)


def full(error: BaseException) -> OSError | None:
    """The system's own error where ``error`` tells of a full disk: it, what it was raised from, or its text."""
    seen: BaseException | None = error
    while seen is not None:
        number = seen.errno if isinstance(seen, OSError) else None
        if number is None and (
            told := re.search(r"\(os error (\d+)\)", str(seen))
        ):  # as safetensors tells it
            number = int(told[1])
        if number in _FULL:
            return OSError(number, os.strerror(number))
        seen = seen.__cause__ or seen.__context__
    return None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Names ``path`` where the disk is full: an ``OSError``, whoever met it first."""
    try:
        yield
    except Exception as error:
        if (found := full(error)) is None:
            raise
        raise OSError(found.errno, found.strerror, str(path)) from error
