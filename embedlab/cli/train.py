"""`embedlab train [-m] key=value ...`: Hydra composes, the run is one function call in this process."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from embedlab.cli.compose import check_added
from embedlab.cli.hydra_main import arguments, in_sweep, run, run_dir
from embedlab.cli.imports import first_import
from embedlab.cli.permission import check_permission
from embedlab.config.read import read_values
from embedlab.config.run import RunConfig
from embedlab.console import quiet, say_once, show_log
from embedlab.data.sources import check_source
from embedlab.distributed.devices import device_count
from embedlab.errors import UserError
from embedlab.files import scratch_folder
from embedlab.run.parse import parse_run, parse_shared
from embedlab.run.places import check_places
from embedlab.run.processes import end_with_starter, start_ranks, wants_processes
from embedlab.run.run_folder import CONFIG, check_free, owned, write_config

log = logging.getLogger(__name__)
AS_FILE = "--cli-config"
_SECTIONS = (*(f.name for f in fields(RunConfig) if f.name != "plain"), "stages", "stages_dir")


def main(argv: Sequence[str]) -> int:
    """Compose and train; a configuration that wants several processes is started again under torchrun.

    With ``--cli-config`` nothing is trained: the file for `embedlab fit --config` is printed.

    Raises:
        UserError: bad input, or a folder that holds another run.
    """
    if AS_FILE in argv:
        from embedlab.cli.run_file import print_run_file

        return print_run_file([a for a in argv if a != AS_FILE])
    status: list[int] = []

    def task(values: dict[str, Any]) -> None:
        check_permission(values, arguments())
        check_added(arguments(), values, _SECTIONS)
        with owned(run_dir(), "hydra.sweep.dir"):
            if in_sweep():  # a single run's folder is `FreeFolder`'s to look at, before Hydra writes there
                check_free(run_dir(), values.get("ckpt_path"), "hydra.sweep.dir")
            status.append(train_one(values, run_dir()))
        if status[-1] and in_sweep():  # in another process, perhaps, whose launcher sees exceptions only
            raise RuntimeError(f"the trial in {run_dir()} ended with status {status[-1]}")

    run(task, "train", argv)
    return max(status, default=0)


def train_one(
    values: dict[str, Any],
    folder: Path,
    whole: Path | None = None,
    extra: dict[str, Any] | None = None,
    command: Sequence[str] | None = None,
) -> int:
    """One run in ``folder``, its stages first; returns its exit status.

    Args:
        values: of the whole configuration.
        folder: of the run.
        whole: the folder to resume in, where this run is a stage of a larger one.
        extra: arguments of Lightning's trainer beyond the configuration's.
        command: that starts a rank of this run, where ``extra`` holds what only it can make.

    Raises:
        UserError: bad input; stages of a run whose ranks only ``command`` can start.
    """
    shared = None
    if not values.get("stages"):  # whose results may be values that are not there yet
        shared = parse_shared(values)
        check_places(shared)
    with first_import("embedlab.run.stages"):
        from embedlab.run.callbacks.checkpoints import find_checkpoint
        from embedlab.run.check import check_rows, check_run
        from embedlab.run.resume import check_recipe, finished
        from embedlab.run.stages import has_stages, run_stages, summary

    if has_stages(values):
        home = whole or folder
        status, main = run_stages(values, folder, lambda stage, place: train_one(stage, place, home))
        if not status:
            status = train_one(main, folder, whole, extra)
        if not status:
            summary(folder, values)
        return status
    config = parse_run(values, shared)
    if wants_processes(config):
        check_run(config)
        checkpoint = find_checkpoint(config.ckpt_path, folder)
        if checkpoint is not None:
            check_recipe(checkpoint, config.plain)
        if finished(config, folder, checkpoint) is not None:
            return 0
        with quiet("embedlab.data.readers"):  # the ranks say it
            check_source(config.data)
        check_rows(config, config.data.most_rows)
        if extra and command is None:
            raise UserError("a run with stages on several devices", key="stages", fix="embedlab train")
        # Not in the run's folder: a start that is refused leaves nothing there.
        with scratch_folder() as kept:
            if not extra or command is None:
                command = _worker_command(values, kept, folder, whole or folder)
            return start_ranks(command, device_count(config.trainer))
    return fit(config, folder, whole, extra)


def fit(config: Any, folder: Path, whole: Path | None = None, extra: dict[str, Any] | None = None) -> int:
    """Train in this process; an interrupted run ends with the shell's status for its signal.

    ``whole``: as for `train_one`; ``extra``: arguments of Lightning's trainer beyond the configuration's.
    """
    with first_import("embedlab.run.run"):
        from embedlab.distributed.lost import PeerLost
        from embedlab.engine.step import NonFiniteLoss
        from embedlab.run.callbacks.checkpoints import Interrupted
        from embedlab.run.run import Run
        from embedlab.run.slurm import requeue

    try:
        Run(config, folder, extra=extra, part=whole is not None and whole != folder).fit()
    except Interrupted as stop:
        again = whole or stop.checkpoint.parent
        # The same command again would be refused in this folder, unless it goes on.
        resumes = config.ckpt_path in ("auto", "last")
        if config.callbacks.requeue and resumes and requeue(stop.number):
            say_once("embedlab: interrupted; the job is queued again")
        else:
            say_once(f"embedlab: interrupted; go on with ckpt_path=last hydra.run.dir={again}")
        return 128 + stop.number
    except (NonFiniteLoss, PeerLost) as error:
        say_once(f"embedlab: {error}")
        return 1
    return 0


def _worker_command(values: dict[str, Any], kept: Path, folder: Path, whole: Path) -> list[str]:
    """What starts a rank of the resolved run: all read the same file in ``kept`` and write to the same folder."""
    path = kept / CONFIG
    write_config(path, values)
    return ["embedlab", "worker", *(str(p.resolve()) for p in (path, folder, whole))]


def worker(argv: Sequence[str]) -> int:
    """A run in a process that another has started, ``embedlab worker CONFIG FOLDER [WHOLE]``; returns its exit status.

    Without WHOLE it is a trial of a sweep, which trains its stages itself. A rank of a run has it, the folder to
    resume in: FOLDER, or that of the run of which this one is a stage.
    """
    end_with_starter()
    show_log()
    path, folder, *whole = map(Path, argv)
    values = read_values(path)
    if whole:
        return fit(parse_run(values), folder, whole[0])
    with owned(folder, "hydra.sweep.dir"):
        return train_one(values, folder)
