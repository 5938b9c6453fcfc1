"""Folders of the cache: made once, whole, by whoever comes first; read only where they are the user's or root's."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from embedlab.errors import UserError
from embedlab.files import cache_dir, is_ours, own_cache_dir, whole_folder
from embedlab.locks import locked

log = logging.getLogger(__name__)
T = TypeVar("T")

_NOT_OURS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP)


class Damaged(Exception):
    """What lies in a folder of the cache is not whole."""


def cached(
    kind: str, key: str, build: Callable[[Path], None], read: Callable[[Path], T], given: str | None = None
) -> T:
    """What `read` finds in the folder `key` of the cache, built first where it is not there yet.

    A build writes beside its place and moves there when it is whole; a lock keeps a second process waiting for the
    first; what a killed build left is removed. Where files there belong to another user (not root), nothing of them is
    read, and the user's own cache takes their place.

    Args:
        kind: what is cached, such as ``token``, whose folder in the cache is ``tokens``.
        key: names the content.
        build: fills an empty folder.
        read: from a folder; raises `Damaged` where it is not whole.
        given: ``data.cache_dir``, another folder than that of the kind.

    Raises:
        UserError: the cache cannot be written.
    """
    place = Path(given).expanduser() if given else cache_dir() / f"{kind}s"
    own = own_cache_dir() / f"{kind}s"
    try:
        try:
            return _opened(place, kind, key, build, read)
        except OSError as bad:
            if bad.errno not in _NOT_OURS or own == place:
                raise
            log.warning("%s: %s: the %s cache is in %s", bad.filename or place, bad.strerror, kind, own)
            return _opened(own, kind, key, build, read)
    except OSError as bad:
        where: dict[str, Any] = {"file": bad.filename or place, "key": "data.cache_dir", "value": given}
        if isinstance(bad, FileExistsError | NotADirectoryError):
            raise UserError("is a file, or below one", **where, fix="a folder for the cache") from None
        raise UserError(
            f"the {kind} cache cannot be written: {bad.strerror or bad}",
            **where,
            fix="free space there, or a folder on another disk",
        ) from None


def _opened(root: Path, kind: str, key: str, build: Callable[[Path], None], read: Callable[[Path], T]) -> T:
    """What is in the folder `key` of `root`.

    Raises:
        OSError: one of `_NOT_OURS` where another user's files are in its place.
    """
    if (found := _trusted(root / key, kind, read)) is not None:
        return found
    root.mkdir(parents=True, exist_ok=True)
    with locked(root / f"{key}.lock", doing=f"is building this {kind} cache"):
        if (found := _trusted(root / key, kind, read)) is not None:
            return found  # another run has built it meanwhile
        with whole_folder(root / key) as folder:
            build(folder)
    if (found := _trusted(root / key, kind, read)) is None:
        raise PermissionError(errno.EACCES, "a damaged cache cannot be replaced", str(root / key))
    return found


def _trusted(folder: Path, kind: str, read: Callable[[Path], T]) -> T | None:
    """What is in a folder; None where nothing whole is."""
    if not os.path.lexists(folder):
        return None
    for path in (folder, *(folder.iterdir() if folder.is_dir() else ())):
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode) or not is_ours(status):
            raise PermissionError(errno.EACCES, "a link, or of another user", str(path))
    try:
        return read(folder)
    except Damaged as bad:
        log.warning("The %s cache is built anew: %s", kind, bad)
        return None
