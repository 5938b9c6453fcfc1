"""A run's folder: who owns it, what may begin in it, and what it was made with."""

from __future__ import annotations

import json
import logging
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from embedlab.config.read import read_record, read_values
from embedlab.config.run_files import Owner
from embedlab.distributed.devices import global_rank
from embedlab.errors import UserError, one_line
from embedlab.files import like, lives, whole_file, write_whole
from embedlab.locks import locked

log = logging.getLogger(__name__)

LAST = "last.ckpt"
PREVIOUS = "previous.ckpt"
AFTER = "scores.json"
CONFIG = "config.yaml"
LOCK = ".lock"
HYDRAS = ".hydra"
_CONFIGS = (CONFIG, f"{HYDRAS}/{CONFIG}")
_REPLACED = (*_CONFIGS, "metrics.csv", "best", "export", "data_report.json", AFTER)
"""What a run writes under names that others use too, and in the place of what is there."""
_held: set[Path] = set()
"""Folders that this process owns."""


@contextmanager
def owned(
    folder: Path, key: str, *, fix: str = "another folder, or wait", wait: bool = False
) -> Iterator[None]:
    """Be the one process that works in a run's folder; in the block, and in what it calls, it is owned already.

    Of a run in several processes the first one owns the folder, or the one that started them. The lock goes with
    its process, however that ends; `.lock` says whose it is.

    Args:
        folder: of the run; made where it is missing, and removed where the block leaves it empty.
        key: that says where the folder is.
        fix: what somebody who is refused can do.
        wait: for another owner to end, instead of a refusal.

    Raises:
        UserError: another process works in it.
        OSError: the folder cannot be made, or its lock is another user's.
    """
    place = folder.resolve()
    if place in _held or global_rank() != 0:
        yield
        return
    missing = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / LOCK
    doing = f"({_owner(lock) or 'unknown so far'}) works in {folder}"
    try:
        with locked(lock, wait, doing) as held:
            if held:
                with _signed(lock, place):
                    yield
                return
            owner = _wait_for_owner(lock)
            if owner is None or (owner.process, owner.host) != (os.getppid(), platform.node()):
                whose = "another process" if owner is None else str(owner)
                raise UserError(f"is in use by {whose}", file=folder, key=key, value=folder, fix=fix)
            yield  # the first rank of a run whose folder is the starter's
    finally:
        if missing:
            with suppress(OSError):
                folder.rmdir()


@contextmanager
def _signed(lock: Path, place: Path) -> Iterator[None]:
    """The owner's name in a lock that is held."""
    before = _owner(lock)
    if before is not None and (before.host != platform.node() or lives(before.process)):
        log.warning(
            "%s was left by %s. Its lock is free: that process was killed, or this file system does not show its "
            "locks here. Make sure that it has ended.", lock, one_line(str(before)),
        )  # fmt: skip
    owner = Owner(os.getpid(), platform.node(), shlex.join(sys.orig_argv)[:500])
    try:
        lock.write_text(
            json.dumps(asdict(owner)), encoding="utf-8"
        )  # in place: another file would not be locked
        _held.add(place)
        yield
    finally:
        _held.discard(place)
        lock.unlink(missing_ok=True)


def _owner(lock: Path) -> Owner | None:
    try:
        return read_record(lock, Owner)
    except UserError:
        return None


def _wait_for_owner(lock: Path) -> Owner | None:
    """Whoever holds a lock; it writes its name a moment after it has it."""
    for _ in range(10):
        if (owner := _owner(lock)) is not None:
            return owner
        time.sleep(0.1)
    return None


def holds_run(folder: Path) -> bool:
    """Whether a run is going on in a folder, or could."""
    # Others have files of this name too: pytest, package managers.
    return any((folder / name).exists() for name in (LAST, PREVIOUS)) or _owner(folder / LOCK) is not None


def run_around(path: Path) -> Path | None:
    """The run's folder for a file that is written to it or as deep as ``export/scores``; None where it is no run's."""
    return next((folder for folder in path.absolute().parents[:3] if holds_run(folder)), None)


def write_config(path: Path, values: dict[str, Any]) -> None:
    """A resolved configuration as a file."""
    write_whole(path, yaml.safe_dump(values, sort_keys=False))


def given_checkpoint(ckpt_path: str) -> Path | None:
    """The file that ``ckpt_path`` names; None for ``last`` and ``auto``, which are looked for in the run's folder.

    Raises:
        UserError: no such file.
    """
    if ckpt_path in ("last", "auto"):
        return None
    path = Path(ckpt_path)
    if not path.is_file():
        fix = like(path) or "a .ckpt file, last or auto"
        raise UserError("no such checkpoint", key="ckpt_path", value=ckpt_path, fix=fix)
    return path


def check_free(folder: Path, ckpt_path: str | None, key: str) -> None:
    """Refuse to begin a run where one is already: its checkpoints, export and scores would be replaced.

    Args:
        folder: of the run.
        ckpt_path: None, a file, ``last`` or ``auto``; a run that goes on in its own folder may.
        key: that says where the folder is.

    Raises:
        UserError: the folder holds the checkpoint or the scores of a run that would not go on; no such checkpoint.
    """
    if ckpt_path is not None and not isinstance(ckpt_path, str):
        raise UserError("not a path", key="ckpt_path", value=ckpt_path, fix="FILE.ckpt, last or auto")
    found = [name for name in (AFTER, LAST, PREVIOUS) if (folder / name).exists()]
    checkpoints = [name for name in found if name != AFTER]
    if not found or ckpt_path == "last" or (ckpt_path == "auto" and checkpoints):
        return
    given = None if ckpt_path is None else given_checkpoint(ckpt_path)
    if given is not None and given.resolve().parent == folder.resolve():
        return
    go_on = "ckpt_path=last to go on with it, " if checkpoints else ""
    raise UserError(
        f"this folder holds a run already ({', '.join(found)}), which a new one would replace",
        file=folder,
        key=key,
        fix=f"another {key}, {go_on}or delete the folder",
    )


def check_own(folder: Path, key: str) -> None:
    """Refuse a folder in which a run would replace what is no run's; beside other things it works.

    Args:
        folder: of the run.
        key: that says where the folder is.

    Raises:
        UserError: it is a file; something of a name that a run writes to is there, and the folder holds no run.
    """
    if folder.exists() and not folder.is_dir():
        fix = "a folder, or a path at which nothing is"
        raise UserError("is a file", key=key, value=folder, fix=fix)
    there = [name for name in _REPLACED if (folder / name).exists()]
    begun = any((folder / name).exists() for name in (LAST, PREVIOUS))
    if there and not begun and not any(_is_runs(folder / name) for name in _CONFIGS):
        what = ", ".join(there)
        raise UserError(
            f"holds no run, but {what}, which one would replace",
            file=folder,
            key=key,
            fix=f"another {key}, or move {'it' if len(there) == 1 else 'them'} away",
        )


def _is_runs(config: Path) -> bool:
    """Whether a file is the configuration of a run, which stands in its folder from its start on."""
    try:
        values = read_values(config)
    except UserError:
        return False
    return isinstance(values, dict) and {"backbone", "method", "data"} <= values.keys()


class Record:
    """The configuration in a run's folder.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / CONFIG
        self._earlier = self.path.read_bytes() if self.path.is_file() else None

    def write(self, values: dict[str, Any]) -> None:
        write_config(self.path, values)

    def put_back(self) -> None:
        """What stood there before `write`, or nothing."""
        if self._earlier is None:
            self.path.unlink(missing_ok=True)
            return
        with whole_file(self.path) as new:
            new.write_bytes(self._earlier)
