"""`hydra.main` as this command line needs it: plain dictionaries in, exceptions out, no chdir."""

from __future__ import annotations

import errno
import functools
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, InstantiationException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from embedlab import files as _paths
from embedlab.cli.compose import explained, known_keys, plain, readable
from embedlab.cli.config_errors import no_flag
from embedlab.cli.exits import REFUSALS, as_user_error
from embedlab.cli.keys import KEYS, annotated
from embedlab.errors import UserError
from embedlab.run.run_folder import HYDRAS, LOCK, check_free, check_own, owned

Task = Callable[[dict[str, Any]], Any]
_FULL_ERROR = "HYDRA_FULL_ERROR"
_HYDRAS = (HYDRAS, f"{HYDRAS}/*", "*.log", "multirun.yaml")
"""Files that Hydra writes."""


class Refusal(BaseException):
    """What a callback of Hydra's raises to end the command: of an `Exception` Hydra makes a warning."""

    def __init__(self, error: UserError) -> None:
        super().__init__(str(error))
        self.error = error


class FreeFolder(Callback):
    """Takes the folder of a run or sweep before Hydra writes its own records there (``conf/train.yaml`` names it)."""

    until_the_end: ExitStack
    """Of the command: what lets go of the folder."""
    there: frozenset[str] = frozenset()
    """What was in the folder before the command, and in its ``.hydra``."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Raises `Refusal` where the folder holds another run or is in use."""
        self._take(config, "hydra.run.dir")

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Raises `Refusal` where the folder of the sweep is in use."""
        self._take(config, "hydra.sweep.dir")

    def _take(self, config: DictConfig, key: str) -> None:
        folder = None
        try:
            folder = str(OmegaConf.select(config, key))
            _check_links(Path(folder), key)
            FreeFolder.there = frozenset(_names(Path(folder)))
            if key == "hydra.run.dir":
                check_own(Path(folder), key)
            self.until_the_end.enter_context(owned(Path(folder), key))
            if key == "hydra.run.dir":
                check_free(Path(folder), OmegaConf.select(config, "ckpt_path"), key)
            self.until_the_end.enter_context(_unused_unless_it_goes_well(Path(folder)))
        except OmegaConfBaseException:  # what does not resolve, Hydra says itself
            return
        except UserError as error:
            raise Refusal(error) from error
        except OSError as error:
            raise Refusal(_not_made(error, key, folder)) from error


def _check_links(folder: Path, key: str) -> None:
    """Refuse a folder in which what Hydra writes in place would go through a link to somewhere else."""
    for pattern in _HYDRAS:
        for path in folder.glob(pattern):
            if path.is_symlink():
                raise UserError(
                    "is a link", file=path, key=key, value=folder, fix="remove it, or another folder"
                )


def run(task: Task, config_name: str, argv: Sequence[str]) -> int:
    """Run ``task`` on the configuration that ``argv`` composes: once, or once for each job under ``-m``.

    Hydra's own flags work (``--multirun``, ``--cfg``, ``--help``, ``--config-dir``, ``hydra.run.dir=``, …).
    ``task`` gets the resolved configuration as a plain dictionary; `run_dir` tells it where to write.

    Returns: 0.

    Raises:
        UserError: a configuration that does not compose, a callback's `Refusal`; also whatever ``task`` raises, as it
            is.
        SystemExit: after ``--help`` and the like, or from ``task`` or a launcher.
    """
    arguments = [readable(a) for a in argv]
    _check_flags(arguments, config_name)
    raised: list[Exception] = []
    started: list[bool] = []
    job = _job(task, raised, started, sys.argv)
    try:
        with (
            _with_meanings(arguments),
            _as_hydra_reads_it(arguments),
            ExitStack() as FreeFolder.until_the_end,
        ):
            FreeFolder.there = frozenset()
            hydra.main(str(_paths.conf_dir()), config_name, version_base="1.3")(job)()
    except Refusal as refusal:
        raise refusal.error from None
    except InstantiationException:
        raise
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        if not started and isinstance(error.__cause__, OSError):  # of the log's file, says Python's logging
            raise _of_folder(error.__cause__, arguments) from error
        overrides = [a for a in arguments if not a.startswith("-") and ("=" in a or a.startswith("~"))]
        found = explained(error, config_name, overrides)
        if found is None:
            raise
        raise found from error
    except OSError as error:
        if started or (error.filename is None and _paths.full(error) is None):
            raise
        raise _of_folder(error, arguments) from error
    if raised:
        raise raised[0]
    return 0


def _of_folder(error: OSError, arguments: list[str]) -> UserError:
    """What Hydra met in the folder of the run or sweep that the arguments name."""
    key = "hydra.sweep.dir" if {"-m", "--multirun"} & set(arguments) else "hydra.run.dir"
    given = next((a.partition("=")[2] for a in arguments if a.startswith(f"{key}=")), None)
    return _not_made(error, key, given)


def _not_made(error: OSError, key: str, given: str | None = None) -> UserError:
    """Python tells which folder or file cannot be opened, but not which is full: that is in the one `given`."""
    where: dict[str, Any] = {"key": key, "value": error.filename or given}
    if isinstance(error, FileExistsError):
        return UserError("is a file", **where, fix="a folder, or a path at which nothing is")
    what, size = "written" if error.filename is None else "made", ""
    if given is not None and _paths.full(error) is not None:
        size = f" after {_paths.size_of(Path(given)):,} bytes"
    fix = REFUSALS[errno.ENOTDIR] if error.errno == errno.ENOTDIR else "a folder that can be written"
    return UserError(f"the folder cannot be {what}: {error.strerror or error}{size}", **where, fix=fix)


def run_dir() -> Path:
    """The folder of the job that is running (``hydra.run.dir``, or its part of ``hydra.sweep.dir``)."""
    return Path(HydraConfig.get().runtime.output_dir)


def arguments() -> list[str]:
    """What the command of the job that is running says, ``key=value`` each."""
    from hydra.core.hydra_config import HydraConfig

    return list(HydraConfig.get().overrides.task)


def in_sweep() -> bool:
    """Whether the job that is running is one of ``-m``, which a launcher of Hydra's kind calls."""
    return bool(HydraConfig.get().mode == RunMode.MULTIRUN)


def _job(task: Task, raised: list[Exception], started: list[bool], argv: list[str]) -> Callable[[Any], Any]:
    """What Hydra calls.

    A single run's exception goes to ``raised``, as Hydra would announce it in a line of its own; under ``-m``
    it is Hydra's launcher that must hear of it. ``started`` is no longer empty once a task has begun.
    """

    @functools.wraps(task)
    def job(config: Any) -> Any:
        started.append(True)
        sys.argv = argv  # as it was, for whoever starts this command again (Lightning does for DDP)
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            return task(plain(config))
        folder = run_dir()
        try:
            return task(plain(config))
        except Exception as error:
            if as_user_error(error) is not None:
                _remove_if_unused(folder)
            raised.append(error)
            return None

    return job


def _check_flags(arguments: list[str], config_name: str) -> None:
    """Raises UserError for a flag that Hydra does not have, where its parser prints its whole usage."""
    parser = get_args_parser()
    flags = {flag for action in parser._actions for flag in action.option_strings}
    for place, argument in enumerate(arguments):
        name = argument.partition("=")[0]
        # argparse takes the beginning of a long flag for it, and `-cjob` for `-c job`.
        if name.startswith("-") and not any(
            flag.startswith(name) or (argument.startswith(flag) and flag[1] != "-") for flag in flags
        ):
            raise no_flag(arguments[place:], known_keys(config_name), f"embedlab {config_name}")


@contextmanager
def _unused_unless_it_goes_well(folder: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        _remove_if_unused(folder)
        raise


def _names(folder: Path) -> Iterator[str]:
    for path in (*folder.glob("*"), *folder.glob(f"{HYDRAS}/*")):
        yield str(path.relative_to(folder))


def _remove_if_unused(folder: Path) -> None:
    """Bad input leaves nothing behind: where Hydra's files are all that came, they go away; what was there stays."""
    new = {name: folder / name for name in _names(folder) if name not in FreeFolder.there}
    logs = {n for n, path in new.items() if path.suffix == ".log" and path.stat().st_size == 0}
    hydras = {n for n in new if n == HYDRAS or n.startswith(f"{HYDRAS}{os.sep}")}
    if new.keys() <= logs | hydras | {LOCK}:  # which goes with its owner, who removes a folder that he made
        for name in sorted(logs | hydras, reverse=True):
            new[name].rmdir() if new[name].is_dir() else new[name].unlink()


@contextmanager
def _with_meanings(arguments: list[str]) -> Iterator[None]:
    """Hydra's help with what each key means, which its template cannot say."""
    if not {"-h", "--help"} & set(arguments):
        yield
        return
    shown = io.StringIO()
    try:
        with redirect_stdout(shown):
            yield
    finally:
        about, mark, config = shown.getvalue().partition(KEYS)
        print(about + mark + annotated(config.strip("\n")) if mark else about)


@contextmanager
def _as_hydra_reads_it(arguments: list[str]) -> Iterator[None]:
    """Hydra takes its arguments from the process, and would print every exception itself and exit 1."""
    argv, full = sys.argv, os.environ.get(_FULL_ERROR)
    sys.argv, os.environ[_FULL_ERROR] = [argv[0], *arguments], "1"
    try:
        yield
    finally:
        sys.argv = argv
        if full is None:
            del os.environ[_FULL_ERROR]
        else:
            os.environ[_FULL_ERROR] = full
