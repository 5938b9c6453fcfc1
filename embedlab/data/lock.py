"""One builder at a time, over processes and over kills."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[bool]:
    """Hold the lock file `path` (made where it is missing, and left there); gives whether it is held.

    The kernel lets go of the lock when its holder ends in any way, so a dead process never keeps it. Where
    the file system has no locks, one line says so and the block runs without.

    Args:
        path: the lock file.
        wait: wait for another holder; otherwise give False at once.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        yield _take(handle, path, wait)
    finally:
        os.close(handle)


def _take(handle: int, path: Path, wait: bool) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError as bad:
        if bad.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            log.warning(
                "no file locks in %s (%s); two runs may build the same cache", path.parent, bad.strerror
            )
            return wait
    if wait:
        log.info("another process is building this token cache; waiting for it")
        fcntl.flock(handle, fcntl.LOCK_EX)
    return wait
