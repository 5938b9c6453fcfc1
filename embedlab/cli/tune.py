"""`embedlab tune key=value … key=SWEEP …`: search over configurations, with pruning (extra: search)."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from embedlab.cli.compose import compose
from embedlab.cli.keys import fields
from embedlab.cli.permission import check_permission
from embedlab.console import show_log
from embedlab.errors import UserError

USAGE = """\
usage: embedlab tune [tune.KEY=VALUE …] key=value … key=SWEEP …

Searches with Optuna over whatever `embedlab train` can be told. Sweeps are Hydra's:
  method.tau=0.03,0.05,0.07   'optimizer.lr=tag(log,interval(1e-6,1e-4))'   'pooling.n=int(interval(1,6))'
Each trial is a fresh process (on GPUs of its own where there are several). One that falls behind is ended early.

keys and their values:
"""


def main(argv: Sequence[str]) -> int:
    """Search; returns 0, or 1 where no trial came to an end.

    Raises:
        UserError: a key that is unknown, nothing that varies, optuna not installed.
    """
    from embedlab.config.build import from_dict
    from embedlab.run.tuning import Space, TuneConfig, tune

    if {"-h", "--help"} & set(argv):
        said = fields(TuneConfig.__module__, TuneConfig.__name__)
        print(
            USAGE + "".join(f"  tune.{k}: {v}\n      {said[k]}\n" for k, v in vars(TuneConfig()).items()),
            end="",
        )
        return 0
    show_log()
    own = dict(_own(a) for a in argv if a.startswith("tune."))
    config = from_dict(TuneConfig, own, "tune")
    space = Space([a for a in argv if not a.startswith("tune.")])
    import optuna  # noqa: F401 - missing, it is one line that names the extra

    now = datetime.datetime.now()
    folder = Path(config.folder or f"runs/{now:%Y-%m-%d}/{now:%H-%M-%S}-tune")
    study = tune(config, space, lambda overrides: _scored(_checked(overrides), config.metric), folder)
    found = [t for t in study.get_trials(deepcopy=False) if t.value is not None]
    states = [t.state.name.lower() for t in study.get_trials(deepcopy=False)]
    print(f"{len(states)} trials: " + ", ".join(f"{states.count(s)} {s}" for s in sorted(set(states))))
    if found:
        best = study.best_trial
        print(
            f"best {config.metric} {best.value:.4f}: {' '.join(f'{k}={v}' for k, v in best.params.items())}"
        )
    print(f"Trials: {folder / 'trials.csv'}")
    return 0 if found else 1


def _own(argument: str) -> tuple[str, Any]:
    key, equals, value = argument.partition("=")
    if not equals:
        raise UserError("key=value is meant", key=key, fix="embedlab tune --help")
    return key.removeprefix("tune."), yaml.safe_load(value)


def _scored(values: dict[str, Any], metric: str) -> dict[str, Any]:
    """`values`, of a run that has the score."""
    evaluation = values["evaluation"]
    if metric.startswith("dev/") and evaluation["sts_dir"] is None and evaluation["dev"] is None:
        raise UserError(
            "these runs are not scored on a development set",
            key="tune.metric",
            value=metric,
            fix="evaluation.sts_dir=DIR or evaluation.dev=FILE, or another score, such as tune.metric=lee/spearman",
        )
    return values


def _checked(overrides: list[str]) -> dict[str, Any]:
    """A configuration that would train; what would not is said before a process is started."""
    from embedlab.run.check import check_run
    from embedlab.run.parse import parse_run
    from embedlab.run.stages import has_stages

    values = compose("train", overrides)
    check_permission(values, overrides)
    config = parse_run({k: v for k, v in values.items() if k not in ("stages", "stages_dir")})
    if not has_stages(values):
        check_run(config)
    return values
