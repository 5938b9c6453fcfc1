"""Sweeps: fresh processes, failed trials survived, finished ones skipped, interrupts passed on."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from embedlab.errors import UserError
from embedlab.run import sweep as launcher
from embedlab.run.sweep import Trial, run_trials


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "RUNNER", ("tests.run.fake_trial",))
    monkeypatch.setattr(launcher, "_devices", list)


def trials(folder: Path, *what: str) -> list[Trial]:
    return [Trial(folder / str(i), {"do": do, "seed": i}, [f"seed={i}"]) for i, do in enumerate(what)]


def times_run(trial: Trial) -> int:
    return len((trial.folder / "runs").read_text())


def test_a_failed_trial_does_not_stop_the_others(tmp_path: Path) -> None:
    assert run_trials(trials(tmp_path, "go", "fail", "go"), tmp_path) == ["finished", "failed", "finished"]
    record = json.loads((tmp_path / "sweep.json").read_text())["trials"]
    assert [t["status"] for t in record] == ["finished", "failed", "finished"]
    assert "it broke" in (tmp_path / "1" / "output.log").read_text()


def test_started_again_only_what_is_missing_runs(tmp_path: Path) -> None:
    run_trials(trials(tmp_path, "go", "fail"), tmp_path)
    again = trials(tmp_path, "go", "fail", "go")
    run_trials(again, tmp_path)
    assert [times_run(t) for t in again] == [1, 2, 1]


def test_a_folder_of_another_trial_is_not_taken_over(tmp_path: Path) -> None:
    run_trials(trials(tmp_path, "go"), tmp_path)
    with pytest.raises(UserError, match="another configuration"):
        run_trials(trials(tmp_path, "fail"), tmp_path)


def test_one_gpu_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_devices", lambda: [2, 5])
    found = trials(tmp_path, "go", "go", "go")
    run_trials(found, tmp_path)
    assert {(t.folder / "device").read_text() for t in found} <= {"2", "5"}
    assert {(t.folder / "device").read_text() for t in found[:2]} == {"2", "5"}


def test_an_interrupt_reaches_the_children_and_the_sweep_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = trials(tmp_path, "wait", "go")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # workers of xdist ignore it

    def interrupt() -> None:
        while not (tmp_path / "0" / "ready").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_trials(found, tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    thread.join()
    assert launcher.status_of(tmp_path / "0") == "interrupted"
    assert not (tmp_path / "1" / "runs").exists()
    config = (tmp_path / "0" / "trial.yaml").read_text().replace("wait", "go")
    (tmp_path / "0" / "trial.yaml").write_text(config)
    assert run_trials(trials(tmp_path, "go", "go"), tmp_path) == ["finished", "finished"]
    assert (tmp_path / "0" / "resumed").exists()


def test_no_child_outlives_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    original = launcher.start_trial

    def start(*arguments):  # type: ignore[no-untyped-def]
        started.append(original(*arguments))
        return started[-1]

    def broken(seconds: float) -> None:
        raise RuntimeError("the launcher broke")

    monkeypatch.setattr(launcher, "start_trial", start)
    monkeypatch.setattr(launcher, "time", SimpleNamespace(sleep=broken, monotonic=time.monotonic))
    with pytest.raises(RuntimeError):
        run_trials(trials(tmp_path, "wait"), tmp_path)
    assert started
    assert all(run.process.poll() is not None for run in started)


@pytest.mark.parametrize("parallel", [0, -1, 1.5, "x", True])
def test_a_number_of_trials_at_once_is_one(tmp_path: Path, parallel: object) -> None:
    with pytest.raises(UserError, match=r"must be at least 1, or null \(hydra.launcher.parallel="):
        run_trials([], tmp_path, parallel)  # type: ignore[arg-type]
