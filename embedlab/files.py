"""The package's own folders, and how it writes: modes, locks, whole files, full disks, files that are damaged."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import pickle
import re
import stat
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from embedlab.errors import UserError

log = logging.getLogger(__name__)

_PACKAGE = Path(__file__).resolve().parent


def conf_dir() -> Path:
    """The Hydra configuration: inside an installed package, beside the package in a checkout."""
    for folder in (_PACKAGE / "conf", _PACKAGE.parent / "conf"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"the installation is not complete: no conf folder in or beside {_PACKAGE}")


def assets_dir() -> Path:
    """What is shipped with the package, such as the encoder ``mini``."""
    return _PACKAGE / "assets"


def cache_dir() -> Path:
    """Where token caches and prepared data go; the folder need not exist yet.

    ``$EMBEDLAB_CACHE``, else ``embedlab`` in the user's cache folder.
    """
    if chosen := os.environ.get("EMBEDLAB_CACHE"):
        return Path(chosen).expanduser().absolute()
    return own_cache_dir()


def own_cache_dir() -> Path:
    """``embedlab`` in the user's cache folder."""
    shared = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG base directory specification: a relative path is invalid and to be ignored.
    base = Path(shared) if os.path.isabs(shared) else Path.home() / ".cache"
    return base / "embedlab"


def is_ours(status: os.stat_result) -> bool:
    """Whether a file belongs to this user or to root: a checksum finds damage, the owner decides trust."""
    return status.st_uid in (os.geteuid(), 0)


def ordinary_mode(path: Path) -> None:
    """Give a file or folder the mode that `open` or `mkdir` would have.

    `tempfile` and safetensors (0.8) make what only its owner may read: nobody else could load it.
    """
    umask = os.umask(0)
    os.umask(umask)
    mode = path.stat().st_mode
    special = stat.S_IMODE(mode) & 0o7000  # a group's folder hands its group on
    path.chmod(special | (0o777 if stat.S_ISDIR(mode) else 0o666) & ~umask)


def check_writable(path: Path, key: str = "out") -> None:
    """UserError, before hours of work, unless the file or folder `path` can be written.

    Folders above it need not exist; none is made here.
    """
    place = next(folder for folder in path.absolute().parents if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=path if path.is_dir() else place):
            pass
    except OSError as error:
        raise UserError(
            f"cannot be written ({place}: {error.strerror})", file=path, key=key, fix="write elsewhere"
        ) from error


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Gives a file beside `path` to write, which takes its place when the block ends well: a reader sees the old
    file or the new one, never a part."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    new = Path(name)
    try:
        yield new
        ordinary_mode(new)
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[bool]:
    """Hold the lock file `path` (made where it is missing, and left there); gives whether it is held.

    The kernel lets go of the lock when its holder ends in any way, so a dead process never keeps it. Where
    the file system has no locks, one line says so and the block runs without.

    Args:
        path: the lock file.
        wait: wait for another holder; otherwise give False at once.

    Raises:
        OSError: it cannot be opened, is a symbolic link (which could lead anywhere), or belongs to another user, who
            could hold it for ever.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        if not is_ours(os.fstat(handle)):
            raise PermissionError(errno.EACCES, "the lock belongs to another user", str(path))
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


_FULL = (errno.ENOSPC, errno.EDQUOT)


def full(error: BaseException) -> OSError | None:
    """The system's own error where ``error`` tells of a full disk: it, what it was raised from, or its text."""
    seen: BaseException | None = error
    while seen is not None:
        number = seen.errno if isinstance(seen, OSError) else None
        if number is None and (
            reported := re.search(r"\(os error (\d+)\)", str(seen))
        ):  # as safetensors tells it
            number = int(reported[1])
        if number in _FULL:
            return OSError(number, os.strerror(number))
        seen = seen.__cause__ or seen.__context__
    return None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Names ``path`` where the disk is full, in an ``OSError``, whichever library met it first."""
    try:
        yield
    except Exception as error:
        if (system_error := full(error)) is None:
            raise
        raise OSError(system_error.errno, system_error.strerror, str(path)) from error


DAMAGED = "the file is damaged, cut short or holds no weights"
OBJECTS = "the file holds Python objects or code, which are never loaded"


def corruption(error: Exception) -> str | None:
    """Why torch or safetensors could not read a file; None where the error says it well enough itself.

    torch's own text proposes ``weights_only=False``, which runs whatever code a file brings.
    """
    from safetensors import SafetensorError

    text = str(error)
    if "Unsupported global" in text or "Unsupported class" in text or "TorchScript" in text:
        return OBJECTS
    if any(word in text for word in ("PytorchStreamReader", "inline_container", "weights_only")):
        return DAMAGED
    kinds = (SafetensorError, pickle.UnpicklingError, zipfile.BadZipFile, EOFError)
    return DAMAGED if isinstance(error, kinds) else None
