"""`embedlab train [-m] key=value ...`: Hydra composes, the run is one function call in this process."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from embedlab.cli.hydra_main import arguments, in_sweep, run, run_dir
from embedlab.cli.permission import check_permission
from embedlab.cli.processes import start_ranks, wants_processes
from embedlab.console import say_once
from embedlab.data.sources import check_source
from embedlab.distributed.devices import device_count
from embedlab.run.folder import check_free
from embedlab.run.parse import parse_run, parse_shared

log = logging.getLogger(__name__)
AS_FILE = "--cli-config"


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
        if in_sweep():  # a single run's folder is `FreeFolder`'s to look at, before Hydra writes there
            check_free(run_dir(), values.get("ckpt_path"), "hydra.sweep.dir")
        status.append(train_one(values, run_dir()))
        if status[-1] and in_sweep():  # in another process, perhaps, whose launcher sees exceptions only
            raise RuntimeError(f"the trial in {run_dir()} ended with status {status[-1]}")

    run(task, "train", argv)
    return max(status, default=0)


def train_one(values: dict[str, Any], folder: Path, whole: Path | None = None) -> int:
    """One run in ``folder``, its stages first; returns its exit status.

    ``whole``: the folder to resume in, where this run is a stage of a larger one.
    """
    shared = None
    if not values.get("stages"):  # whose results may be values that are not there yet
        shared = parse_shared(values)
        if shared["ckpt_path"] is None:  # a run that goes on may have nothing left to read
            check_source(shared["data"])
    from embedlab.run.check import check_rows, check_run
    from embedlab.run.stages import has_stages, run_stages, summary

    if has_stages(values):
        home = whole or folder
        status, main = run_stages(values, folder, lambda stage, place: train_one(stage, place, home))
        status = status or train_one(main, folder, whole)
        if not status:
            summary(folder, values)
        return status
    config = parse_run(values, shared)
    if wants_processes(config):
        check_run(config)
        if _has_ended(config, folder):
            return 0
        check_source(config.data)
        check_rows(config, config.data.most_rows)
        return _spawn(values, folder, device_count(config.trainer), whole or folder)
    return fit(config, folder, whole)


def fit(config: Any, folder: Path, whole: Path | None = None, extra: dict[str, Any] | None = None) -> int:
    """Train in this process; an interrupted run ends with the shell's status for its signal.

    ``whole``: as for `train_one`; ``extra``: arguments of Lightning's trainer beyond the configuration's.
    """
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
    except NonFiniteLoss as error:
        say_once(f"embedlab: {error}")
        return 1
    return 0


def _has_ended(config: Any, folder: Path) -> bool:
    """Whether there is nothing to start processes for; `UserError` where less is asked for than is done."""
    from embedlab.run.callbacks.checkpoints import find_checkpoint
    from embedlab.run.record import check_recipe
    from embedlab.run.resume import finished

    checkpoint = find_checkpoint(config.ckpt_path, folder)
    if checkpoint is None:
        return False
    check_recipe(checkpoint, config.plain)
    return finished(config, folder, checkpoint) is not None


def _spawn(values: dict[str, Any], folder: Path, processes: int, whole: Path) -> int:
    """Hand the resolved run to fresh processes: every rank reads the same file and the same folder."""
    # Not in the run's folder: a start that is refused leaves nothing there.
    with tempfile.TemporaryDirectory(prefix="embedlab-") as kept:
        path = Path(kept) / "config.yaml"
        path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
        return start_ranks(
            "embedlab.cli.worker", [str(p.resolve()) for p in (path, folder, whole)], processes
        )
