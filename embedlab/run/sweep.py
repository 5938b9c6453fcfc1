"""The trials of a sweep: fresh processes, each with its own GPUs, finished ones skipped, a failed one survived."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from embedlab.config.read import read_record, read_values
from embedlab.config.run_files import TRIAL, TrialEnd
from embedlab.console import progress_bar
from embedlab.errors import UserError, printable
from embedlab.files import write_whole
from embedlab.run.processes import Process, end, start
from embedlab.run.run_folder import LAST, PREVIOUS, check_free, owned, write_config

log = logging.getLogger(__name__)

CONFIG = "trial.yaml"
OUTPUT = "output.log"
STATUS = TRIAL
RECORD = "sweep.json"
RUNNER = ("embedlab", "worker")
"""What follows ``python -m`` in a trial's command line."""
FINISHED, FAILED, INTERRUPTED = "finished", "failed", "interrupted"
# By its own handler, and by the signal before it had one.
_INTERRUPTS = tuple(x for s in (signal.SIGTERM, signal.SIGINT) for x in (128 + s, -s))
_IGNORED = ("ckpt_path",)  # keys that do not make another trial


@dataclass(frozen=True)
class Trial:
    """One run of a sweep.

    Args:
        folder: of the run.
        config: resolved, plain.
        overrides: what makes it differ from the others, ``key=value``.
    """

    folder: Path
    config: dict[str, Any]
    overrides: Sequence[str]


@dataclass
class Running:
    """A trial in its process."""

    trial: Trial
    process: Process
    devices: Devices
    began: float


Devices = tuple[str, ...]
"""CUDA devices as CUDA_VISIBLE_DEVICES names them; none on the CPU."""


def free_devices(parallel: int | None, wanted: int = 1) -> list[Devices]:
    """Where trials may run at once, at most ``parallel``; without CUDA so many, or one, on the CPU.

    Args:
        parallel: trials at once; None: as many as there are devices for.
        wanted: devices of a trial.

    Raises:
        UserError: a trial wants more than there are.
    """
    there = _devices()
    if not there:
        return [()] * (parallel or 1)
    if wanted > len(there):
        raise UserError(
            f"this machine has {len(there)} for a trial",
            key="trainer.devices",
            value=wanted,
            fix=str(len(there)),
        )
    groups = [tuple(there[i : i + wanted]) for i in range(0, len(there) - wanted + 1, wanted)]
    return groups[:parallel]


def devices_wanted(config: Mapping[str, Any]) -> int:
    """CUDA devices of a trial of this configuration; 1 where it takes what is there."""
    trainer = config.get("trainer") or {}
    devices = trainer.get("devices")
    if trainer.get("accelerator") == "cpu":
        return 1
    if isinstance(devices, list | tuple):
        return max(1, len(devices))
    return max(1, int(str(devices))) if str(devices).isdigit() else 1


def run_trials(trials: Sequence[Trial], sweep: Path, parallel: int | None = None) -> list[str]:
    """Run every trial that is not finished; one whose process dies is recorded and the others go on.

    A trial that left a checkpoint is resumed, one that an earlier launcher left running is waited for. Ctrl-C goes to
    all children once (they write their checkpoints), a second one ends them.

    Args:
        trials: of the sweep.
        sweep: its folder; gets ``sweep.json`` with every trial's overrides and status.
        parallel: trials at once; None: as many as there are CUDA devices for, else one.

    Returns:
        Each trial's status: ``finished``, ``failed`` or ``interrupted``.

    Raises:
        UserError: a folder holds a trial of another configuration, or a run that is no trial; the sweep is running.
        KeyboardInterrupt: after an interrupt, when all children have ended.
    """
    if parallel is not None and (type(parallel) is not int or parallel < 1):
        raise UserError(
            "must be at least 1, or null", key="hydra.launcher.parallel", value=parallel, fix="a whole number"
        )
    for i, trial in enumerate(trials):
        if any(trial.config == other.config for other in trials[:i]):
            log.warning("Twice in the sweep, and once in its report: %s", " ".join(trial.overrides))
    with owned(sweep, "hydra.sweep.dir"):
        for trial in trials:
            wait_for_orphan(trial.folder)
        claim(trials)
        wanted = max((devices_wanted(t.config) for t in trials), default=1)
        _run(trials, sweep, free_devices(parallel, wanted))
    return [status_of(t.folder) or FAILED for t in trials]


def wait_for_orphan(folder: Path) -> None:
    """Until a trial whose launcher was killed has ended: it ends by itself, and writes its checkpoint before."""
    with owned(folder, "hydra.sweep.dir", wait=True):
        pass


def _run(trials: Sequence[Trial], sweep: Path, free: list[Devices]) -> None:
    waiting = [t for t in trials if status_of(t.folder) != FINISHED]
    skipped = len(trials) - len(waiting)
    if skipped:
        log.info("%d of %d trials are finished already.", skipped, len(trials))
    same = common(trials)
    _record(sweep, trials)
    running: list[Running] = []
    stopping = False
    bar = ExitStack()
    move = bar.enter_context(
        progress_bar("sweep", f"of {len(trials)} trials", len(trials), None, skipped, lines=False)
    )
    move(skipped, skipped)
    try:
        while waiting or running:
            while waiting and free:
                running.append(start_trial(waiting.pop(0), free.pop(0), same))
            try:
                time.sleep(0.2)
                for run in [r for r in running if r.process.poll() is not None]:
                    running.remove(run)
                    free.append(run.devices)
                    ended = len(trials) - len(waiting) - len(running)
                    _record_end(run, f"{ended} of {len(trials)}")
                    _record(sweep, trials)
                    move(ended, ended)
            except KeyboardInterrupt:
                if stopping:
                    raise
                stopping, waiting = True, []
                log.warning("Interrupted: the running trials write their checkpoints; again to stop at once.")
                end((r.process for r in running), signal.SIGTERM)
    finally:
        bar.close()
        end((r.process for r in running), signal.SIGKILL)
        _record(sweep, trials)
    if stopping:
        done = sum(status_of(t.folder) == FINISHED for t in trials)
        log.warning(
            "%d of %d trials are finished. To go on: the same command, with hydra.sweep.dir=%s",
            done, len(trials), sweep,
        )  # fmt: skip
        raise KeyboardInterrupt


def common(trials: Sequence[Trial]) -> set[str]:
    """Overrides that all trials have, which need not be said of each."""
    return set.intersection(*(set(t.overrides) for t in trials)) if len(trials) > 1 else set()


def summarise(sweep: Path, trials: Sequence[Trial]) -> None:
    """Print the table of what is finished, mean ± SD over seeds (`embedlab report` writes it, with a baseline), and
    which trials failed."""
    from embedlab.report.report import make_report
    from embedlab.report.runs import find_runs, group_runs

    try:
        runs, unfinished = find_runs([sweep])
        make_report(group_runs(runs), unfinished, title=f"Sweep {sweep}").print()
    except UserError as nothing:  # no trial finished, or none was scored
        log.warning("No table of the sweep: %s", nothing)
    failed = [t for t in trials if status_of(t.folder) != FINISHED]
    if failed:
        same = common(trials)
        lines = (
            f"  {t.folder.name}: {' '.join(o for o in t.overrides if o not in same)} ({t.folder / OUTPUT})"
            for t in failed
        )
        log.error("%d of %d trials failed:\n%s", len(failed), len(trials), "\n".join(lines))


def status_of(folder: Path) -> str | None:
    """How the trial in a folder ended, or None where it has not (or its process was killed)."""
    try:
        return read_record(folder / STATUS, TrialEnd).status
    except UserError:
        return None


def claim(trials: Sequence[Trial]) -> None:
    """Write each trial's configuration in its folder, after a look at all of them.

    Raises:
        UserError: a folder holds a trial of another configuration, or a run that is no trial.
    """
    for trial in [t for t in trials if not _is_claimed(t)]:
        trial.folder.mkdir(parents=True, exist_ok=True)
        write_config(trial.folder / CONFIG, trial.config)


def _is_claimed(trial: Trial) -> bool:
    """Whether the trial's configuration is in its folder; a folder of another trial or run is not taken over."""
    path = trial.folder / CONFIG
    there = _recorded(path)
    if there is not None:
        changed = sorted(
            key
            for key in {**there, **trial.config}
            if key not in _IGNORED and there.get(key) != trial.config.get(key)
        )
        if changed:
            raise UserError(
                f"this folder holds a trial of another configuration (section {changed[0]!r} differs)",
                file=trial.folder,
                key="hydra.sweep.dir",
                fix="another hydra.sweep.dir, or the sweep's own command",
            )
        return True
    check_free(trial.folder, trial.config.get("ckpt_path"), "hydra.sweep.dir")
    return False


def _recorded(path: Path) -> dict[str, Any] | None:
    """The configuration of the trial in a folder; None where there is none, or one that cannot be read."""
    if not path.exists():
        return None
    try:
        there = read_values(path, fix="")
    except UserError as error:
        log.warning("%s: written anew", error)
        return None
    return there if isinstance(there, dict) else None


def _devices() -> list[str]:
    """The CUDA devices that this process may use, by index or UUID (a cluster's, or a slice of a card); asked without
    starting CUDA in this process."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = map(str.strip, visible.split(","))  # CUDA sees those before the first that is none
        return list(takewhile(lambda name: name.isdecimal() or name.startswith(("GPU-", "MIG-")), names))
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return []
    return [str(i) for i in range(sum(line.startswith("GPU ") for line in found.splitlines()))]


def start_trial(trial: Trial, devices: Devices, same: Collection[str] = ()) -> Running:
    """In a process of its own, on its own devices; a trial that left a checkpoint goes on from it.

    Args:
        trial: to start.
        devices: that it sees.
        same: overrides of all trials, which need not be said.
    """
    config = dict(trial.config)
    (trial.folder / STATUS).unlink(missing_ok=True)
    if (trial.folder / LAST).exists() or (trial.folder / PREVIOUS).exists():
        config["ckpt_path"] = "last"
    path = trial.folder / "resolved.yaml"
    write_config(path, config)
    # Trials are grouped by their sweep on W&B, unless the configuration or the environment says otherwise.
    environment = {"WANDB_RUN_GROUP": os.environ.get("WANDB_RUN_GROUP", trial.folder.parent.name)}
    if devices:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    process = start([*RUNNER, str(path), str(trial.folder)], environment, trial.folder / OUTPUT)
    where = f" on GPU {' and '.join(devices)}" if devices else ""
    log.info(
        "started %s%s: %s", trial.folder.name, where, " ".join(o for o in trial.overrides if o not in same)
    )
    return Running(trial, process, devices, time.monotonic())


def _record_end(run: Running, progress: str) -> None:
    code, name = run.process.returncode, run.trial.folder.name
    status = FINISHED if code == 0 else INTERRUPTED if code in _INTERRUPTS else FAILED
    seconds = round(time.monotonic() - run.began, 1)
    write_status(run, status, code, seconds=seconds)
    log.info("%s: %s %s after %.0f s", progress, name, status, seconds)
    if status == FAILED:
        log_failure(run, code)


def log_failure(run: Running, code: int) -> None:
    """A line in the log with the last one of a trial's output."""
    lines = (run.trial.folder / OUTPUT).read_text(errors="replace").strip().splitlines()
    log.error(
        "%s failed (exit %d): %s", run.trial.folder.name, code, printable(lines[-1][:300]) if lines else ""
    )


def write_status(run: Running, status: str, code: int | None, **more: float) -> None:
    """How a trial ended, in its folder."""
    content = {"status": status, "exit": code, **more, "overrides": list(run.trial.overrides)}
    write_whole(run.trial.folder / STATUS, json.dumps(content))


def _record(sweep: Path, trials: Sequence[Trial]) -> None:
    rows = [
        {
            "folder": os.path.relpath(t.folder, sweep),
            "overrides": list(t.overrides),
            "status": status_of(t.folder),
        }
        for t in trials
    ]
    write_whole(sweep / RECORD, json.dumps({"trials": rows}, indent=2))
