"""How a command ends: one line and status 2 for what the user can mend, a traceback for the rest."""

from __future__ import annotations

import errno
import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from embedlab.cli.config_errors import explain
from embedlab.console import say_once
from embedlab.errors import UserError

BAD_INPUT = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
BROKEN_PIPE = 141  # 128 + SIGPIPE

# Packages that not everyone needs: the extra of pyproject.toml that brings each.
EXTRA_OF_MODULE = {
    "gensim": "quickstart",
    "emoji": "quickstart",
    "sentence_transformers": "st",
    "mteb": "eval",
    "ir_measures": "eval",
    "sklearn": "eval",
    "umap": "plot",
    "onnx": "onnx",
    "onnxruntime": "onnx",
    "onnxscript": "onnx",
    "gguf": "gguf",
    "submitit": "cluster",
    "optuna": "search",
    "ray": "ray",
}


# What a file system refuses, and what the user can do about it.
REFUSALS = {
    errno.EACCES: "a place where you may read and write",
    errno.EPERM: "a place where you may read and write",
    errno.EROFS: "a place where you may read and write",
    errno.ENOTDIR: "a path that does not lead through a file",
    errno.ELOOP: "a path that is no link",
    errno.EEXIST: "another path; this one is taken",
    errno.EISDIR: "the path of a file; this is a folder",
    errno.ENOTEMPTY: "another path; this folder is not empty",
    errno.ENAMETOOLONG: "a shorter path",
    errno.ENOSPC: "free space on this disk, or a path on another",
    errno.EDQUOT: "free space on this disk, or a path on another",
    errno.EFBIG: "a disk or a limit (ulimit -f) that takes larger files",
}


def guarded(command: Callable[[], int | None]) -> int:
    """Run ``command`` and return its exit status; what the user can mend becomes one line on stderr.

    Raises: whatever else ``command`` raises.
    """
    try:
        status = command()
        sys.stdout.flush()
        return status or 0
    except KeyboardInterrupt as stop:
        return _interrupted(stop)
    except SystemExit as stop:
        if isinstance(stop.__context__, KeyboardInterrupt):  # Lightning's answer to Ctrl-C is sys.exit(1)
            return _interrupted(stop.__context__)
        if isinstance(stop.__context__, BrokenPipeError):  # and Rich's to a closed pipe
            return _reader_left()
        raise
    except BrokenPipeError:
        if not _stdout_is_closed():  # some other pipe or socket broke: a failure like any other
            raise
        return _reader_left()
    except Exception as error:
        found = as_user_error(error)
        if found is None:
            raise
        say_once(f"embedlab: {found}")
        return BAD_INPUT


def as_user_error(error: BaseException) -> UserError | None:
    """``error`` as the user's to mend, even if another library has wrapped it; None if it is not theirs."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, UserError):
            return seen
        seen = seen.__cause__
    if isinstance(error, ModuleNotFoundError):
        return _missing_extra(error)
    if isinstance(error, OSError):
        return _refused_path(error)
    return explain(error)


def _refused_path(error: OSError) -> UserError | None:
    """What the file system says of a path that the user gave: no program can mend that."""
    fix = REFUSALS.get(error.errno or 0)
    path = error.filename if error.filename2 is None else error.filename2  # of a renaming, the new name
    if fix is None or not isinstance(path, str | os.PathLike | bytes):
        return None
    text = error.strerror or os.strerror(error.errno or 0)
    return UserError(text[:1].lower() + text[1:], file=os.fsdecode(path), fix=fix)


def _missing_extra(error: ModuleNotFoundError) -> UserError | None:
    module = (error.name or "").partition(".")[0]
    if module not in EXTRA_OF_MODULE:
        return None
    return UserError(
        f"this needs the package {module}, which is not installed",
        fix=f"pip install 'embedlab[{EXTRA_OF_MODULE[module]}]'",
    )


@contextmanager
def going_on() -> Iterator[None]:
    """Around work that is kept: where Ctrl-C ends the command, it says that the same one goes on."""
    try:
        yield
    except KeyboardInterrupt as stop:
        stop.args = ("interrupted; the same command goes on",)
        raise


def _interrupted(stop: KeyboardInterrupt) -> int:
    said = stop.args[0] if stop.args else "interrupted"
    print(f"embedlab: {said}", file=sys.stderr)
    return INTERRUPTED


def _reader_left() -> int:
    """End quietly, as `embedlab … | head` should: Python's own flush at exit must not meet the pipe again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    return BROKEN_PIPE


def _stdout_is_closed() -> bool:
    try:
        sys.stdout.flush()
        poll = select.poll()
        poll.register(sys.stdout.fileno(), select.POLLOUT)
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    except BrokenPipeError:
        return True
    except (OSError, ValueError):  # stdout is no file, as under a test runner
        return False
