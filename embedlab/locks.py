"""One process at a time: lock files, which the kernel frees when their holder ends in any way; and its own folder."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from embedlab.errors import UserError
from embedlab.files import BESIDE, is_ours, made, remove

log = logging.getLogger(__name__)


@contextmanager
def sole_writer(path: Path, key: str, lock: Path | None = None) -> Iterator[None]:
    """Be the one process that writes `path`.

    Args:
        path: a file or a folder.
        key: that says where it is.
        lock: the lock file, which is gone at the end; None: a hidden one beside `path`.

    Raises:
        UserError: another process writes it.
        OSError: as `locked`.
    """
    file = lock or path.absolute().with_name(f".{path.absolute().name}.lock")
    with made(file.parent), locked(file, wait=False) as held:
        if not held:
            fix = "wait for it, or another place"
            raise UserError("another process writes it", file=path, key=key, fix=fix)
        try:
            yield
        finally:
            if not _filled(file):
                file.unlink(missing_ok=True)


@dataclass(frozen=True)
class WorkFolder:
    """A folder in which the work of a command grows until it is done. What else lies there is never touched.

    Attributes:
        path: of the folder.
        mark: the file that says whose work it is; the first one that is written and the last one that is removed.
        names: a pattern of the other files and folders that the command makes.
        kept: a pattern (`Path.glob`) of what is worth going on with.
        lock: the lock file.
    """

    path: Path
    mark: str
    names: str
    kept: str
    lock: str = "lock"

    @contextmanager
    def held(self, of: Path, key: str, stays: bool = False) -> Iterator[None]:
        """Be the one process that works here.

        Args:
            of: what the work is for, and `key` says where it is.
            key: for messages.
            stays: afterwards; else it is gone. A block that fails leaves what was there or is worth going on with.

        Raises:
            UserError: another process works here, or there are other things than such work.
        """
        self.check(key)
        begun = (self.path / self.mark).exists()
        with sole_writer(of, key, self.path / self.lock):
            try:
                yield
            except BaseException:
                if not begun and not any(self.path.glob(self.kept)):
                    self.clear()
                raise
            if not stays:
                self.clear()

    def empty(self) -> None:
        """Remove the work, but for the lock."""
        names = sorted(
            filter(self._own, os.listdir(self.path)), reverse=True
        )  # what says that it is done, late
        for name in sorted(names, key=lambda name: name == self.mark):
            remove(self.path / name)

    def clear(self) -> None:
        """Remove the work, and the folder where nothing else is in it."""
        if self.path.is_dir():
            self.empty()
            with suppress(OSError):
                (self.path / self.lock).unlink(missing_ok=True)
                self.path.rmdir()

    def _own(self, name: str) -> bool:
        beside = BESIDE.fullmatch(name)
        name = beside["name"] if beside else name
        return name == self.mark or re.fullmatch(self.names, name) is not None

    def check(self, key: str) -> None:
        """UserError where there are other things than such work."""
        if self.path.exists() and not self.path.is_dir():
            raise UserError("is a file", file=self.path, key=key, fix="another place")
        names = set(os.listdir(self.path) if self.path.is_dir() else ())
        names -= set() if _filled(self.path / self.lock) else {self.lock}
        found = [name for name in names if not self._own(name)]
        if not found and self.mark not in names:
            found = [name for name in names if not BESIDE.fullmatch(name)]
        if found:
            told = f"holds other things than the work of this command, such as {min(found)}"
            raise UserError(told, file=self.path, key=key, fix="another place, or move them away")


def _filled(lock: Path) -> bool:
    """Whether a lock file says something, as none of ours does here: it is another program's."""
    return lock.exists() and lock.stat().st_size > 0


@contextmanager
def locked(path: Path, wait: bool = True, doing: str = "holds this lock") -> Iterator[bool]:
    """Hold the lock file `path` (made where it is missing, and left there); gives False where another holds it.

    The kernel lets go of the lock when its holder ends in any way, so a dead process never keeps it; nor does a
    child that the holder has forked. A holder may remove the file at its end. Where the file system has no locks,
    one line says so and the block runs without.

    Args:
        path: the lock file.
        wait: wait for another holder; otherwise give False at once.
        doing: what a holder does, for the line in the log that says for what this process waits.

    Raises:
        OSError: it cannot be opened, is a symbolic link (which could lead anywhere), or belongs to another user, who
            could hold it for ever.
    """
    with made(path.parent):
        handle = _open_lock(path)
    try:
        held = _take(handle, path, wait, doing)
        while held and not (path.exists() and os.path.samestat(os.fstat(handle), path.stat())):
            _close_lock(handle)
            handle = _open_lock(path)
            held = _take(handle, path, wait, doing)
        yield held
    finally:
        _close_lock(handle)


_locks: set[int] = set()
"""Open lock files of this process."""


def _open_lock(path: Path) -> int:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    _locks.add(handle)
    if not is_ours(os.fstat(handle)):
        _close_lock(handle)
        raise PermissionError(errno.EACCES, "the lock belongs to another user", str(path))
    return handle


def _close_lock(handle: int) -> None:
    if handle in _locks:
        _locks.remove(handle)
        os.close(handle)


def _close_locks() -> None:
    for handle in tuple(_locks):
        _close_lock(handle)


# The workers of a loader outlive a killed process for a while, and would hold its locks with it.
os.register_at_fork(after_in_child=_close_locks)


def _take(handle: int, path: Path, wait: bool, doing: str) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError as bad:
        if bad.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            log.warning(
                "no file locks in %s (%s); other processes are not waited for", path.parent, bad.strerror
            )
            return True
    if wait:
        log.info("another process %s; waiting for it (%s)", doing, path)
        fcntl.flock(handle, fcntl.LOCK_EX)
    return wait
