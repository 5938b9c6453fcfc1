"""The package's own folders, and how it writes: modes, whole files, full disks, files that are damaged."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import platform
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from embedlab.errors import UserError, nearest

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

_PACKAGE = Path(__file__).resolve().parent


def conf_dir() -> Path:
    """The Hydra configuration: inside an installed package, beside the package in a checkout."""
    for folder in (_PACKAGE / "conf", _PACKAGE.parent / "conf"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"the installation is not complete: no conf folder in or beside {_PACKAGE}")


def assets_dir() -> Path:
    """What is shipped with the package: encoders."""
    return _PACKAGE / "assets"


SENTENCE_ENCODER = "mini-sentence"
"""The shipped encoder to use, and the one that is meant where none is named; ``mini``, whose body it has, is the one to
train from."""


def shipped_encoders() -> list[str]:
    """Names of the encoders that this installation has in its box."""
    return sorted(path.parent.name for path in assets_dir().glob("*/embedlab.json"))


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
    place = next(folder for folder in (*path.absolute().parents, Path("/")) if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=path if path.is_dir() else place):
            pass
    except OSError as error:
        raise UserError(
            f"cannot be written ({place}: {error.strerror})", file=path, key=key, fix="write elsewhere"
        ) from error


def like(path: Path, also: Sequence[str] = (), only: Callable[[Path], bool] = os.path.lexists) -> str:
    """The fix where nothing is at a path: what lies beside it, or is `also` known, under a name like its own; "" where
    there is none. What lies beside it and is not of the kind that is wanted (`only`) is no fix."""
    try:
        beside = os.listdir(path.parent)
    except OSError:
        beside = []
    # Not itself: a pipe, a link to nothing.
    others = [name for name in beside if name != path.name and only(path.with_name(name))]
    near = [n for n in nearest(path.name, [*others, *also], n=3) if nearest(path.stem, [Path(n).stem])]
    return f"did you mean {path.with_name(near[0])}?" if near else ""


def existing_folder(given: Any, fix: str, key: str | None = None) -> Path:
    """The folder at a path that was given, for `key`; UserError where that is a file's, or nobody's."""
    folder = Path(str(given))
    if folder.is_dir():
        return folder
    there = folder.exists()
    problem = "is a file" if there else "no such folder"
    fix = fix if there else like(folder, only=Path.is_dir) or fix
    raise UserError(problem, file=folder, key=key, value=given if key else None, fix=fix)


def check_absent(path: Path, overwrite: bool) -> None:
    """UserError where an output that a command was given is there, and it was not told to replace it."""
    if path.exists() and not overwrite:
        fix = "overwrite=true, or another place"
        raise UserError("is there already", file=path, key="overwrite", value="false", fix=fix)


def check_replaceable(folder: Path, marks: Sequence[str], what: str, overwrite: bool = True) -> None:
    """Whether a folder may be written: it is not there, or empty, or holds `what` (one of the files `marks`).

    Raises:
        UserError: it is a file, holds other things, or what is there must not be overwritten.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError("is a file", file=folder, fix="name a folder")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not any((folder / mark).is_file() for mark in marks):
        raise UserError(f"holds other things than {what}", file=folder, fix="another folder, or empty it")
    if not overwrite:
        fix = "overwrite=true, or another folder"
        raise UserError(f"holds {what} already", file=folder, key="overwrite", value="false", fix=fix)


BESIDE = re.compile(r"\.(?P<name>.+)\.(?P<host>[^.]+)\.(?P<process>\d+)\.[a-z0-9_]{8}\.(?P<kind>new|old)")
"""What a process writes beside a target until it is whole (``new``), and what it is about to replace (``old``)."""
_HOST = re.sub(r"[^\w-]", "-", platform.node()) or "localhost"
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK)
"""Of file systems without hard links (exFAT, mounted buckets): there the last of two that begin at once stays."""
_own: set[str] = set()
"""Paths in use by this process; others with its number are of an earlier one, as in a container that is restarted."""


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Gives a file beside `path` to write, which takes its place when the block ends well: a reader sees the old
    file or the new one, never a part. A full disk is told as `writing` does."""
    with _beside(path, "new") as new, writing(path, new):
        new.touch()
        with _in_use(new):
            yield new
            _finish(new)
            os.replace(new, path)


def write_whole(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    with whole_file(path) as new:
        new.write_text(text, encoding="utf-8")


def write_new(path: Path, content: str | bytes) -> bool:
    """Write a file, whole, unless there is one: of several processes one succeeds. False where there was one."""
    with _beside(path, "new") as new, writing(path, new):
        new.touch()
        with _in_use(new):
            new.write_bytes(content.encode() if isinstance(content, str) else content)
            _finish(new)
            try:
                os.link(new, path)
            except OSError as bad:
                if bad.errno in _NO_LINKS and not path.exists():
                    os.replace(new, path)
                elif bad.errno in (*_NO_LINKS, errno.EEXIST):
                    return False
                else:
                    raise
    return True


def write_header(file: IO[bytes], dtype: DTypeLike, shape: tuple[int, ...]) -> None:
    """The beginning of a .npy file, after which the bytes of an array follow, row by row."""
    import numpy as np

    descr = np.lib.format.dtype_to_descr(np.dtype(dtype))
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})


def write_array(file: IO[bytes] | Path, array: NDArray[Any]) -> None:
    """As `np.save`, which may end well on a full disk: what the C library still held is lost without a word."""
    import numpy as np

    if isinstance(file, Path):
        with file.open("wb") as opened:
            return write_array(opened, array)
    write_header(file, array.dtype, array.shape)
    file.write(np.ascontiguousarray(array).data)


@contextmanager
def whole_folder(target: Path, replace: bool = True) -> Iterator[Path]:
    """Gives an empty folder beside `target`, which takes its place when the block ends well, and is gone otherwise.
    Unless it may `replace` one, what others have put there meanwhile stays (an OSError that names it).

    The two change places at once. Where the file system cannot (NFS), there is no `target` between two renames: what
    kills the process there leaves the old folder hidden, and the next `whole_folder` or `whole_file` beside it on the
    same machine puts it back. It also removes what dead processes left. A full disk is told as `writing` does.
    """
    with made(target.parent), _beside(target, "new") as new, writing(target, new):
        new.mkdir()
        with _in_use(new):
            yield new
            for path in (*new.rglob("*"), new):
                _finish(path)
            if not target.exists() or not (replace or target.is_symlink()):
                new.rename(target)  # which the system refuses where a folder is not empty
            elif not exchange(new, target):
                _replace_folder(new, target)


@contextmanager
def made(folder: Path) -> Iterator[None]:
    """See that `folder` and those above it are there; of those that it makes, a block that fails leaves none empty."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for each in missing:
            with suppress(OSError):
                each.rmdir()
        raise


def exchange(one: Path, other: Path) -> bool:
    """Let two files or folders of one file system change places, so that neither name is missing at any moment.

    Returns False, and changes nothing, where the system cannot.
    """
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2  # Linux 3.15, glibc 2.28
    except AttributeError:
        return False
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return int(rename(here, os.fsencode(one), here, os.fsencode(other), swap)) == 0


def _replace_folder(new: Path, target: Path) -> None:
    with _in_use(target), _beside(target, "old") as old:
        target.rename(old)
        try:
            new.rename(target)
        except BaseException:
            old.rename(target)
            raise


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Gives an empty folder among the system's temporary ones, of this user alone, which is gone at the end.

    A kill leaves it there, with a model's weights in it perhaps; the next one removes what dead processes left.
    """
    with _beside(Path(tempfile.gettempdir(), "embedlab"), "new") as folder, writing(folder):
        folder.mkdir(0o700)
        with _in_use(folder):
            yield folder


@contextmanager
def _beside(target: Path, kind: str) -> Iterator[Path]:
    """A path in the folder of `target` that says whose it is; whatever lies there at the end is removed."""
    _sweep(target.parent)
    draw = secrets.token_hex(4)
    path = target.with_name(f".{target.name}.{_HOST}.{os.getpid()}.{draw}.{kind}")
    _own.add(path.name)
    try:
        yield path
    finally:
        if kind == "new" or target.exists():
            remove(path)
        _own.discard(path.name)


@contextmanager
def _in_use(path: Path, lock: int = fcntl.LOCK_SH) -> Iterator[bool]:
    """Lock a file or folder, so that `_sweep` leaves it alone in another container, too, where the number of this
    process is nobody's or its own; gives False where another has it. Where it cannot be locked, the number has to do.
    """
    handle, free = None, True
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        fcntl.flock(handle, lock | fcntl.LOCK_NB)
    except OSError as bad:
        free = bad.errno != errno.EWOULDBLOCK
    try:
        yield free
    finally:
        if handle is not None:
            os.close(handle)


def _sweep(folder: Path) -> None:
    """Put back or remove what dead processes of this machine left in a folder."""
    found = [match for name in os.listdir(folder) if (match := BESIDE.fullmatch(name))]
    for match in sorted(found, key=lambda m: m["kind"], reverse=True):  # old ones first
        if match["host"] == _HOST and match[0] not in _own and not lives(int(match["process"])):
            left, target = folder / match[0], folder / match["name"]
            with suppress(OSError), _in_use(left, fcntl.LOCK_EX) as free:  # another process sweeps too
                if not free or not is_ours(left.lstat()):
                    continue
                if match["kind"] == "old" and not target.exists():
                    left.rename(target)
                else:
                    remove(left)


def lives(process: int) -> bool:
    """Whether another process has this number."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return process != os.getpid()


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with all that is in it, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _finish(path: Path) -> None:
    """On the disk before a rename shows it, with the mode of what `open` or `mkdir` makes."""
    if path.is_symlink():
        return
    ordinary_mode(path)
    if path.is_file():
        with path.open("rb") as file:
            os.fsync(file.fileno())


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskFull(OSError):
    """What `writing` raises: number, text and file."""


def full(error: BaseException) -> OSError | None:
    """The system's own error where ``error`` tells of a full disk: it, what it was raised from, or its text."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, DiskFull):
            return seen
        number = seen.errno if isinstance(seen, OSError) else None
        if number is None and (reported := re.search(r"\(os error (\d+)\)", str(seen))):  # safetensors' words
            number = int(reported[1])
        if number is None and re.fullmatch(r"\d+ requested and \d+ written", str(seen)):  # numpy's
            number = errno.ENOSPC
        if number in _FULL:
            return OSError(number, os.strerror(number))
        seen = seen.__cause__ or seen.__context__
    return None


@contextmanager
def writing(path: Path, part: Path | None = None) -> Iterator[None]:
    """Names ``path``, and how much of it was written, where the disk is full, whichever library met it first.

    Args:
        path: the file or folder that is written.
        part: what holds it until it is whole; None: ``path`` itself.

    Raises:
        DiskFull: no space, the end of a quota or of the largest file there may be.
    """
    try:
        yield
    except DiskFull as error:
        if part is not None and Path(error.filename).is_relative_to(part):
            error.filename = str(path)
        raise
    except Exception as error:
        if (system_error := full(error)) is None:
            raise
        text = f"{system_error.strerror} after {size_of(part or path):,} bytes"
        raise DiskFull(system_error.errno, text, str(path)) from error


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    found = path.rglob("*") if path.is_dir() else (path,)
    return sum(each.stat().st_size for each in found if each.is_file())


def sha256(path: Path) -> str:
    """Of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of(folder: Path, files: Iterable[Path]) -> str:
    """Of the names of files below a folder, in their order, and of their bytes."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(folder)} {sha256(path)}\n".encode())
    return digest.hexdigest()
