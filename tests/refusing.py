"""A file system that refuses: what changes a folder fails as the system would say it, from a chosen change on.

Python tells a hook of every file that it opens and every folder that it makes, before it does. Code that opens files
without Python (safetensors, faiss, torch's writer) is not seen; `tests.test_full_disk` limits the size of its files.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_TAKES_SPACE = ("open", "os.mkdir", "os.rename", "os.link", "os.symlink")
_CHANGES = (*_TAKES_SPACE, "os.remove", "os.rmdir", "os.chmod", "os.truncate", "shutil.rmtree")


@dataclass
class Refusal:
    """What refuses, and what was asked of it.

    Attributes:
        folders: below which, and which themselves, changes fail.
        error: the number of the system's error.
        after: as many changes go well before.
        events: kinds of changes.
        seen: the changes so far.
    """

    folders: tuple[str, ...]
    error: int
    after: int
    events: tuple[str, ...]
    seen: list[str] = field(default_factory=list)

    def meets(self, event: str, given: tuple[Any, ...]) -> None:
        if event not in self.events or (event == "open" and not int(given[2] or 0) & _WRITES):
            return
        path = given[1] if event in ("os.rename", "os.link", "os.symlink") else given[0]
        if not isinstance(path, str | bytes | os.PathLike):
            return
        place = os.path.abspath(os.fsdecode(path))
        if not any(place == folder or place.startswith(f"{folder}/") for folder in self.folders):
            return
        if event == "os.mkdir" and os.path.isdir(place):
            return  # the system says first that it is there
        self.seen.append(f"{event} {place}")
        if len(self.seen) > self.after:
            raise OSError(self.error, os.strerror(self.error), os.fsdecode(path))


_active: list[Refusal] = []
_hooked: list[bool] = []


def _hook(event: str, given: tuple[Any, ...]) -> None:
    for refusal in _active:
        refusal.meets(event, given)


@contextmanager
def refusing(*folders: Path, error: int, after: int = 0, full: bool = False) -> Iterator[Refusal]:
    """Inside, folders refuse.

    Args:
        folders: these, and all below them.
        error: the number of the system's error.
        after: as many changes go well before.
        full: what takes no space (removing, above all) goes well.
    """
    if not _hooked:
        sys.addaudithook(_hook)
        _hooked.append(True)
    events = _TAKES_SPACE if full else _CHANGES
    _active.append(Refusal(tuple(os.path.abspath(f) for f in folders), error, after, events))
    try:
        yield _active[-1]
    finally:
        _active.pop()
