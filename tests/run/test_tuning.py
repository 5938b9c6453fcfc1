"""A search: poor trials are ended early, failed ones survived, a killed search goes on."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from embedlab.cli import tune as command
from embedlab.errors import UserError
from embedlab.run import sweep as launcher
from embedlab.run.tuning import BEST, TABLE, Space, TuneConfig, tune

pytest.importorskip("optuna")


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "RUNNER", ("tests.run.fake_search_trial",))
    monkeypatch.setattr(launcher, "_devices", list)


def compose(overrides: list[str]) -> dict[str, Any]:
    return dict(o.partition("=")[::2] for o in overrides)


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / TABLE).open() as file:
        return list(csv.DictReader(file))


def test_the_space_is_written_as_hydra_writes_sweeps() -> None:
    import optuna

    space = Space(["a=1,2", "lr=tag(log,interval(1e-5,1e-3))", "n=int(interval(2,4))", "x=[1,2]", "y='b,c'"])
    assert space.fixed == ["x=[1,2]", "y='b,c'"]
    trial = optuna.create_study().ask()
    found = dict(o.split("=") for o in space.suggest(trial))
    assert found["a"] in ("1", "2")
    assert 1e-5 <= float(found["lr"]) <= 1e-3
    assert found["n"] in ("2", "3", "4")
    assert trial.distributions["lr"].log


def test_the_best_of_a_search_is_found(tmp_path: Path) -> None:
    config = TuneConfig(trials=6, pruner="none", parallel=3)
    study = tune(config, Space(["quality=1,2,3,4", "slow=0"]), compose, tmp_path)
    best = json.loads((tmp_path / BEST).read_text())
    assert best["value"] == study.best_value == max(float(r["value"]) for r in rows(tmp_path))
    assert best["overrides"]["quality"] == str(int(study.best_value))
    assert [r["state"] for r in rows(tmp_path)] == ["complete"] * 6


def test_a_trial_that_falls_behind_is_ended_early(tmp_path: Path) -> None:
    """Three good ones set the median; a poor one would take a minute, and is told to stop at its second score."""

    class Planned(Space):
        fixed: list[str] = []  # noqa: RUF012
        devices = 1

        def __init__(self) -> None:
            """No sweep: one trial after the other."""

        def suggest(self, trial: Any) -> list[str]:
            return [
                ["quality=7", "slow=0"],
                ["quality=8", "slow=0"],
                ["quality=9", "slow=0"],
                ["quality=1", "slow=1"],
            ][trial.number]

    study = tune(TuneConfig(trials=4), Planned(), compose, tmp_path)
    assert study.trials[3].state.name == "PRUNED"
    assert (tmp_path / "3" / "stopped").exists()
    assert json.loads((tmp_path / "3" / "trial.json").read_text())["status"] == "pruned"


def test_a_failed_trial_is_tried_again_and_does_not_end_the_search(tmp_path: Path) -> None:
    study = tune(TuneConfig(trials=2, retries=1), Space(["quality=0,0"]), compose, tmp_path)
    assert [t.state.name for t in study.trials] == ["FAIL", "FAIL"]
    assert (tmp_path / "0" / "runs").read_text() == "xx"
    assert not (tmp_path / BEST).exists()


def test_a_search_goes_on_in_its_folder(tmp_path: Path) -> None:
    space = ["quality=1,2", "slow=0"]
    tune(TuneConfig(trials=2), Space(space), compose, tmp_path)
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    left = optuna.load_study(
        study_name="embedlab", storage=JournalStorage(JournalFileBackend(str(tmp_path / "study.log")))
    )
    left.ask()  # what a killed search leaves
    study = tune(TuneConfig(trials=4), Space(space), compose, tmp_path)
    assert [t.state.name for t in study.trials] == ["COMPLETE", "COMPLETE", "FAIL", "COMPLETE"]


@pytest.mark.parametrize("parts", [(1, 2), (3, 6), (2, 3, 5)])
@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1])
def test_a_search_that_goes_on_tries_nothing_again(parts: tuple[int, ...], seed: int, tmp_path: Path) -> None:
    space = ["quality=1", "slow=0", "lr=interval(0.1,0.9)"]
    for trials in parts:
        study = tune(
            TuneConfig(trials=trials, pruner="none", seed=seed), Space(space), compose, tmp_path / "a"
        )
    assert len({t.params["lr"] for t in study.trials}) == parts[-1]
    whole = tune(TuneConfig(trials=parts[0], seed=seed), Space(space), compose, tmp_path / "b")
    assert [t.params for t in whole.trials] == [t.params for t in study.trials[: parts[0]]], "the seed counts"


def test_another_space_is_another_search(tmp_path: Path) -> None:
    tune(TuneConfig(trials=1), Space(["quality=1,2", "slow=0"]), compose, tmp_path)
    with pytest.raises(UserError, match=r"tune\.folder"):
        tune(TuneConfig(trials=2), Space(["quality=1,2,3", "slow=0"]), compose, tmp_path)


def test_a_metric_that_no_trial_has_ends_the_search(tmp_path: Path) -> None:
    config = TuneConfig(trials=3, metric="dev/spaerman")
    with pytest.raises(UserError, match=r"tune\.metric=dev/spaerman\)\. Fix: one of "):
        tune(config, Space(["quality=1,2", "slow=0"]), compose, tmp_path)
    assert not (tmp_path / "1").exists()


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["tune.trials=0", "seed=1,2"], "tune.trials=0"),
        (["tune.seed=4294967296", "seed=1,2"], "tune.seed=4294967296"),
        (["tune.pruner=axe", "seed=1,2"], "tune.pruner=axe"),
        (["tune.nonsense=1", "seed=1,2"], "tune.nonsense"),
        (["seed=1"], "nothing varies"),
        (
            ["seed=1,2", "experiment=quickstart"],
            r"tune\.metric=dev/spearman\)\. Fix: evaluation\.sts_dir=DIR",
        ),
    ],
)
def test_bad_input_is_named(arguments: list[str], part: str) -> None:
    with pytest.raises(UserError, match=part):
        command.main(arguments)


def test_a_suggestion_that_cannot_train_starts_no_process(tmp_path: Path) -> None:
    arguments = ["method.tau=0,-1", "trainer=cpu", f"tune.folder={tmp_path / 'x'}", "tune.trials=1"]
    with pytest.raises(UserError, match=r"method\.tau"):
        command.main(arguments)
    assert not list((tmp_path / "x").glob("*/output.log"))


@pytest.mark.parametrize(
    ("line", "devices"),
    [
        (("method.tau=0.1,0.2",), 1),
        (("trainer.devices=2", "method.tau=0.1,0.2"), 2),
        (("trainer.devices=1,4,2",), 4),
        (("trainer.devices=[0,1]", "method.tau=0.1,0.2"), 2),
        (("trainer=ddp", "method.tau=0.1,0.2"), 1),
        (("trainer=cpu", "trainer.devices=4", "method.tau=0.1,0.2"), 1),
    ],
)
def test_devices_of_a_trial(line: tuple[str, ...], devices: int) -> None:
    assert Space(line).devices == devices
