"""A search over configurations with Optuna's ask and tell: trials in fresh processes, poor ones ended early."""

from __future__ import annotations

import csv
import json
import logging
import math
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from embedlab.config.build import Record, within
from embedlab.config.run_files import read_numbers
from embedlab.errors import UserError, nearest
from embedlab.files import whole_file, write_whole
from embedlab.run import sweep as launcher
from embedlab.run.processes import end
from embedlab.run.run_folder import AFTER, owned
from embedlab.run.sweep import Trial

if TYPE_CHECKING:
    import optuna

log = logging.getLogger(__name__)
JOURNAL, BEST, TABLE = "study.log", "best.json", "trials.csv"
Compose = Callable[[list[str]], dict[str, Any]]


@dataclass(frozen=True)
class TuneConfig(Record):
    """How to search.

    Args:
        trials: in all, those of an earlier call in the same folder among them.
        metric: of metrics.csv, whose best value in a run counts, or of scores.json.
        direction: ``maximize`` or ``minimize``.
        pruner: ``median`` (ends a trial that is below the median of the others at its step), ``halving``
            (asynchronous successive halving) or ``none``.
        warmup: scorings of a trial before it may be ended.
        seed: of the sampler (TPE), to which a search that goes on adds its trials so far.
        parallel: trials at once; None: one for each CUDA device, else one.
        retries: further tries for a trial whose process fails; each goes on from its checkpoint.
        folder: of the search; the same one again goes on with it.
    """

    section = "tune"

    trials: int = within(20, least=1)
    metric: str = "dev/spearman"
    direction: Literal["maximize", "minimize"] = "maximize"
    pruner: Literal["median", "halving", "none"] = "median"
    warmup: int = within(1, least=0)
    seed: int = within(0, least=0, below=2**32)
    parallel: int | None = within(None, least=1)
    retries: int = within(0, least=0)
    folder: str | None = None


class Space:
    """What varies: Hydra's own sweeps, ``a=1,2``, ``choice(…)``, ``range(…)``, ``interval(…)``, ``tag(log, …)``."""

    def __init__(self, overrides: Sequence[str]) -> None:
        from hydra.core.override_parser.overrides_parser import OverridesParser

        parsed = OverridesParser.create().parse_overrides(list(overrides))
        self.fixed = [o.input_line for o in parsed if not o.is_sweep_override() and o.input_line]
        self._swept = {o.get_key_element(): o for o in parsed if o.is_sweep_override()}
        if not self._swept:
            raise UserError(
                "nothing varies",
                fix="'optimizer.lr=tag(log,interval(1e-6,1e-4))' or method.tau=0.03,0.05,0.07",
            )

    @property
    def devices(self) -> int:
        """The most CUDA devices that a trial may want."""
        given = dict(line.lstrip("+").partition("=")[::2] for line in self.fixed)
        asked = self._swept.get("trainer.devices")
        values = [given.get("trainer.devices")] if asked is None else list(asked.sweep_string_iterator())
        cpu = "cpu" in (given.get("trainer"), given.get("trainer.accelerator"))
        accelerator = "cpu" if cpu else "cuda"
        wanted = ({"accelerator": accelerator, "devices": yaml.safe_load(str(v))} for v in values)
        return max(launcher.devices_wanted({"trainer": trainer}) for trainer in wanted)

    def suggest(self, trial: optuna.Trial) -> list[str]:
        """One value of each key, as overrides."""
        return [f"{key}={self._value(trial, key, override)}" for key, override in self._swept.items()]

    @staticmethod
    def _value(trial: optuna.Trial, key: str, override: Any) -> Any:
        sweep = override.value()
        if not override.is_interval_sweep():
            return trial.suggest_categorical(key, list(override.sweep_string_iterator()))
        log_scale = "log" in sweep.tags
        if isinstance(sweep.start, int) and isinstance(sweep.end, int):
            return trial.suggest_int(key, sweep.start, sweep.end, log=log_scale)
        return repr(trial.suggest_float(key, sweep.start, sweep.end, log=log_scale))


@dataclass
class _Live:
    trial: optuna.Trial
    run: launcher.Running
    tries: int = 0
    seen: set[int] = field(default_factory=set)
    pruned: bool = False


def tune(config: TuneConfig, space: Space, compose: Compose, folder: Path) -> optuna.Study:
    """Search; returns the study. ``best.json`` and ``trials.csv`` in the folder say what was found.

    A failed trial is recorded, and the search goes on. Ctrl-C ends the trials (they write their checkpoints).

    Args:
        config: how.
        space: of the configurations.
        compose: overrides to a plain configuration.
        folder: of the search.

    Raises:
        UserError: a suggestion that is no valid configuration; the folder is in use.
    """
    with owned(folder, "tune.folder"):
        return _search(config, space, compose, folder)


def _search(config: TuneConfig, space: Space, compose: Compose, folder: Path) -> optuna.Study:
    study = _study(config, folder)
    free = launcher.free_devices(config.parallel, space.devices)
    live: list[_Live] = []
    try:
        while True:
            while free and len(study.get_trials(deepcopy=False)) < config.trials:
                live.append(_begin(study.ask(), space, compose, folder, free.pop(0)))
            if not live:
                break
            time.sleep(0.2)
            for one in list(live):
                if not _goes_on(one, study, config):
                    live.remove(one)
                    free.append(one.run.devices)
    except KeyboardInterrupt:
        log.warning("Interrupted. To go on: the same command, with tune.folder=%s", folder)
        raise
    finally:
        end((one.run.process for one in live), signal.SIGTERM)
        for one in live:
            one.run.process.wait()
            study.tell(one.trial, state=_states().FAIL)
        _write(study, folder)
    return study


def _study(config: TuneConfig, folder: Path) -> optuna.Study:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend
    from optuna.study import StudyDirection

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruners: dict[str, optuna.pruners.BasePruner] = {
        "median": optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=0, n_min_trials=2),
        "halving": optuna.pruners.SuccessiveHalvingPruner(),
        "none": optuna.pruners.NopPruner(),
    }
    # Lines of JSON: a search that was killed goes on, and no pickle is read.
    study = optuna.create_study(
        storage=JournalStorage(JournalFileBackend(str(folder / JOURNAL))),
        study_name="embedlab",
        load_if_exists=True,
        direction=StudyDirection[config.direction.upper()],
        pruner=pruners[config.pruner],
    )
    # A stream of its own for a search that goes on: from the start again it would suggest what has been tried.
    begun = len(study.get_trials(deepcopy=False))
    study.sampler = optuna.samplers.TPESampler(seed=(config.seed + begun) % 2**32)
    for left in study.get_trials(deepcopy=False, states=(_states().RUNNING,)):
        launcher.wait_for_orphan(folder / str(left.number))
        study.tell(left.number, state=_states().FAIL)
    return study


def _states() -> Any:
    from optuna.trial import TrialState

    return TrialState


def _begin(
    trial: optuna.Trial, space: Space, compose: Compose, folder: Path, devices: launcher.Devices
) -> _Live:
    try:
        chosen = space.suggest(trial)
    except ValueError as error:
        raise UserError(
            f"Optuna cannot go on with these ranges: {error}",
            key="tune.folder", value=folder,
            fix="intervals from low to high (above 0 on a log scale); in a folder begun with others, another folder",
        ) from None  # fmt: skip
    one = Trial(folder / str(trial.number), compose([*space.fixed, *chosen]), chosen)
    launcher.claim([one])
    return _Live(trial, launcher.start_trial(one, devices))


def _goes_on(one: _Live, study: optuna.Study, config: TuneConfig) -> bool:
    """Report what a trial has logged, end it where it is hopeless, and tell the study of one that has ended."""
    folder, states = one.run.trial.folder, _states()
    code = one.run.process.poll()
    values = logged(folder, config.metric)
    for step, value in values:
        if step not in one.seen:
            one.seen.add(step)
            one.trial.report(value, step)
    if code is None:
        if not one.pruned and len(one.seen) > config.warmup and one.trial.should_prune():
            one.pruned = True
            log.info("%s is ended early: %s", folder.name, " ".join(one.run.trial.overrides))
            end([one.run.process], signal.SIGTERM)
        return True
    status = launcher.FINISHED
    if one.pruned:
        study.tell(one.trial, state=states.PRUNED)
        status = "pruned"
    elif code == 0 and (best := final(folder, config, values)) is not None:
        study.tell(one.trial, best)
        log.info("%s: %s = %.4f", folder.name, config.metric, best)
    elif code != 0 and one.tries < config.retries:
        one.tries += 1
        one.run = launcher.start_trial(one.run.trial, one.run.devices)
        return True
    elif code == 0:
        raise _no_metric(folder, config.metric)  # nor will the other trials have it
    else:
        launcher.log_failure(one.run, code)
        study.tell(one.trial, state=states.FAIL)
        status = launcher.FAILED
    launcher.write_status(one.run, status, code)
    return False


def _records(folder: Path) -> list[dict[str, str]]:
    try:
        with (folder / "metrics.csv").open(newline="") as file:
            return list(csv.DictReader(file))
    except OSError:  # not there yet
        return []


def _final_scores(folder: Path) -> dict[str, float | None]:
    """Null where a score is no number; nothing where there are none."""
    try:
        return {k: None if math.isnan(v) else v for k, v in read_numbers(folder / AFTER).items()}
    except UserError:
        return {}


def logged(folder: Path, metric: str) -> list[tuple[int, float]]:
    """A metric by step, as far as a run has come."""
    try:
        return [
            (int(r["step"]), float(r[metric])) for r in _records(folder) if r.get("step") and r.get(metric)
        ]
    except ValueError:  # a line is being written
        return []


def final(folder: Path, config: TuneConfig, values: list[tuple[int, float]]) -> float | None:
    """What counts of a finished run: its best logged value, or the one in scores.json."""
    best = max if config.direction == "maximize" else min
    found = [value for _, value in values if value == value]
    return best(found) if found else _final_scores(folder).get(config.metric)


def _no_metric(folder: Path, metric: str) -> UserError:
    known = {name for record in _records(folder)[:1] for name in record if name != "step"}
    known |= _final_scores(folder).keys()
    near = nearest(metric, known) or sorted(known)
    return UserError(
        "a finished trial has no such score", file=folder, key="tune.metric", value=metric,
        fix=f"one of {', '.join(near)}" if near else "evaluation.sts_dir=..., so that there are scores",
    )  # fmt: skip


def _write(study: optuna.Study, folder: Path) -> None:
    trials = study.get_trials(deepcopy=False)
    keys = sorted({key for t in trials for key in t.params})
    with whole_file(folder / TABLE) as new, new.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["trial", "state", "value", *keys])
        for t in trials:
            writer.writerow(
                [t.number, t.state.name.lower(), t.value if t.value is not None else "",
                 *(t.params.get(k, "") for k in keys)]
            )  # fmt: skip
    if any(t.value is not None for t in trials):
        best = study.best_trial
        content = {"trial": best.number, "value": best.value, "overrides": best.params}
        write_whole(folder / BEST, json.dumps(content, indent=2))
