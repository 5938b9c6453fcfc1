"""W&B, TensorBoard and metrics.csv: one record a run, the same content, also over a resume."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest

from embedlab.engine.step import NonFiniteLoss
from embedlab.errors import UserError
from embedlab.run.callbacks.checkpoints import Interrupted
from embedlab.run.run import train
from tests.run.test_resume import StopAt

RUN = ("trainer.max_steps=4", "evaluation.every=2", "evaluation.select=last")


def from_csv(folder: Path) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    with (folder / "metrics.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if name != "step" and value:
                    found.setdefault(name, {})[int(row["step"])] = float(value)
    return found


def from_tensorboard(folder: Path) -> tuple[dict[str, dict[int, float]], set[str]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    scalars = {t: {e.step: e.value for e in events.Scalars(t)} for t in events.Tags()["scalars"]}
    return scalars, set(events.Tags()["histograms"])


def test_tensorboard_says_what_the_csv_says(compose_run, sts_dir, tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    settings = (*RUN, f"evaluation.sts_dir={sts_dir}", "logger=tensorboard")
    with monkeypatch.context() as patch:
        StopAt(3, patch)
        with pytest.raises(Interrupted):
            train(compose_run(*settings), tmp_path)
    train(compose_run(*settings, "ckpt_path=last"), tmp_path)
    table, (board, histograms) = from_csv(tmp_path), from_tensorboard(tmp_path)
    assert board.keys() == table.keys()
    for name, values in table.items():
        assert board[name].keys() == values.keys(), name
        for step, value in values.items():
            assert board[name][step] == pytest.approx(value, rel=1e-5) or math.isnan(value)
    assert {"train/loss", "dev/spearman", "lr", "final/dev/spearman"} <= table.keys()
    assert list(table["train/loss"]) == [1, 2, 3, 4]
    assert histograms == {"dev/pair_cosines", "dev/norms", "dev/singular_values"}


class FakeRun:
    """Stands in for W&B's service: what a run is told."""

    def __init__(self, **options: Any) -> None:
        self.options, self.logged, self.finished = options, [], 0  # type: ignore[var-annotated]
        self.id, self.name = options.get("id"), options.get("name")
        self.config = self
        self.values: dict[str, Any] = {}
        self.url = "https://wandb.example/run"

    def update(self, values: dict[str, Any], allow_val_change: bool = False) -> None:
        self.values |= values

    def log(self, values: dict[str, Any], **_: Any) -> None:
        self.logged.append(values)

    def define_metric(self, *_: Any, **__: Any) -> None: ...

    def finish(self, *_: Any, **__: Any) -> None:
        self.finished += 1


@pytest.fixture
def wandb_runs(monkeypatch):  # type: ignore[no-untyped-def]
    import wandb
    from lightning.pytorch.loggers import wandb as lightning_wandb

    made: list[FakeRun] = []

    def init(**options: Any) -> FakeRun:
        made.append(FakeRun(**options))
        return made[-1]

    monkeypatch.setenv("WANDB_MODE", "")  # so that it is put back after the logger has set it
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("embedlab.run.loggers._has_netrc", lambda: False)
    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(wandb, "Run", FakeRun, raising=False)
    monkeypatch.setattr(lightning_wandb, "Run", FakeRun, raising=False)
    monkeypatch.setattr(lightning_wandb.WandbLogger, "finalize", lambda *_: None)
    return made


def test_one_record_a_run_offline_without_a_key(compose_run, sts_dir, tmp_path, wandb_runs, monkeypatch):  # type: ignore[no-untyped-def]
    """A resumed run goes on under its id; an interrupted one is finished too."""
    import os

    settings = (*RUN, f"evaluation.sts_dir={sts_dir}", "logger=wandb", "logger.wandb.group=sweep")
    with monkeypatch.context() as patch:
        StopAt(3, patch)
        with pytest.raises(Interrupted):
            train(compose_run(*settings), tmp_path)
    assert [run.finished for run in wandb_runs] == [1]
    train(compose_run(*settings, "ckpt_path=last"), tmp_path)
    first, second = wandb_runs
    assert first.options["id"] == second.options["id"] == (tmp_path / "wandb_id").read_text()
    assert (first.options["resume"], first.options["group"]) == ("allow", "sweep")
    assert os.environ["WANDB_MODE"] in ("offline", "dryrun")
    assert second.finished == 1
    assert first.values["optimizer"]["lr"] == 1e-3
    named = {name for values in first.logged + second.logged for name in values}
    assert {
        "train/loss",
        "dev/spearman",
        "dev/pair_cosines",
        "dev/singular_values",
        "final/dev/spearman",
    } <= named
    assert set(from_csv(tmp_path)) <= named
    train(compose_run(*settings), tmp_path / "another")
    assert wandb_runs[2].options["id"] != first.options["id"]


def test_a_run_that_breaks_is_finished_too(compose_run, tmp_path, wandb_runs, monkeypatch):  # type: ignore[no-untyped-def]
    from embedlab.methods.simcse import SimCSE

    original = SimCSE.losses

    def broken(self, batch):  # type: ignore[no-untyped-def]
        outcome = original(self, batch)
        return type(outcome)({k: v * float("nan") for k, v in outcome.losses.items()})

    monkeypatch.setattr(SimCSE, "losses", broken)
    with pytest.raises(NonFiniteLoss):
        train(compose_run("trainer.max_steps=2", "logger=wandb"), tmp_path)
    assert [run.finished for run in wandb_runs] == [1]


def test_only_the_first_process_records(compose_run, tmp_path, wandb_runs, monkeypatch):  # type: ignore[no-untyped-def]
    from embedlab.run.loggers import _wandb, finish

    monkeypatch.setenv("RANK", "1")
    tmp_path.mkdir(exist_ok=True)
    finish([_wandb(compose_run("logger=wandb"), tmp_path)])
    assert wandb_runs == []
    assert not (tmp_path / "wandb_id").exists()


def test_a_setting_that_wandb_has_not_is_one_line(compose_run, tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    from embedlab.run import loggers

    def refuse(**settings: object) -> None:
        raise TypeError("init() got an unexpected keyword argument 'a'")

    monkeypatch.setattr(loggers, "WandbLogger", refuse)
    tmp_path.mkdir(exist_ok=True)
    with pytest.raises(UserError, match=r"unexpected keyword argument 'a' \(logger\.wandb="):
        loggers._wandb(compose_run("logger=wandb"), tmp_path)


def test_trials_of_a_sweep_are_one_group(tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    from embedlab.run import sweep as launcher
    from embedlab.run.sweep import Trial, run_trials

    monkeypatch.setattr(launcher, "RUNNER", ("tests.run.fake_trial",))
    monkeypatch.setattr(launcher, "_devices", list)
    monkeypatch.delenv("WANDB_RUN_GROUP", raising=False)
    sweep = tmp_path / "my-sweep"
    run_trials([Trial(sweep / str(i), {"do": "go", "seed": i}, [f"seed={i}"]) for i in range(2)], sweep)
    assert [json.loads((sweep / str(i) / "group").read_text()) for i in range(2)] == ["my-sweep"] * 2


@pytest.mark.parametrize("key", ["", "a" * 40])
def test_where_it_is_recorded_stands_in_the_log(compose_run, tmp_path, wandb_runs, monkeypatch, caplog, key):  # type: ignore[no-untyped-def]
    from embedlab.run.loggers import _wandb, finish

    monkeypatch.setenv("HOME", str(tmp_path))  # without a netrc
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", key)
    with caplog.at_level("INFO", logger="embedlab"):
        finish([_wandb(compose_run("logger=wandb"), tmp_path)])
    assert ("https://wandb.example/run" in caplog.text) == bool(key)
    assert ("wandb sync" in caplog.text) != bool(key)
    assert "anonymous" not in wandb_runs[0].options
