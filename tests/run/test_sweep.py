"""Sweeps: fresh processes, failed trials survived, finished ones skipped, interrupts passed on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from embedlab.config.read import read_record
from embedlab.config.run_files import Owner
from embedlab.errors import UserError
from embedlab.run import sweep as launcher
from embedlab.run.run_folder import LOCK
from embedlab.run.sweep import Trial, run_trials

own_devices = launcher._devices


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


def test_a_trial_that_stands_twice_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A sweeper may draw the same values again; a user's seed=0,0 would be n=1."""
    one, other = trials(tmp_path, "go", "go")
    again = Trial(tmp_path / "2", one.config, one.overrides)
    assert run_trials([one, other, again], tmp_path) == ["finished"] * 3
    assert [r.message for r in caplog.records if r.levelname == "WARNING"] == [
        "Twice in the sweep, and once in its report: seed=0"
    ]


def test_a_folder_of_another_trial_is_not_taken_over(tmp_path: Path) -> None:
    run_trials(trials(tmp_path, "go"), tmp_path)
    with pytest.raises(UserError, match="another configuration"):
        run_trials(trials(tmp_path, "fail"), tmp_path)


def test_one_gpu_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_devices", lambda: ["2", "5"])
    found = trials(tmp_path, "go", "go", "go")
    run_trials(found, tmp_path)
    assert {(t.folder / "device").read_text() for t in found} <= {"2", "5"}
    assert {(t.folder / "device").read_text() for t in found[:2]} == {"2", "5"}


@pytest.mark.parametrize(("visible", "seen"), [
    ("2,5", ["2", "5"]), (" 0 , 1", ["0", "1"]), ("", []), ("-1", []), ("0,-1,1", ["0"]),
    ("GPU-8932f937,GPU-1f2e", ["GPU-8932f937", "GPU-1f2e"]), ("MIG-a1/3/0,MIG-a1/4/0", ["MIG-a1/3/0", "MIG-a1/4/0"]),
])  # fmt: skip
def test_devices_are_those_that_cuda_sees(
    visible: str, seen: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubernetes and MIG name devices by UUID: trials of a sweep on two of them shared the first, one after another."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(launcher, "_devices", own_devices)
    assert launcher.free_devices(None) == ([(name,) for name in seen] or [()])
    found = trials(tmp_path, "go", "go")
    run_trials(found, tmp_path)
    assert {(t.folder / "device").read_text() for t in found} <= set(seen or [visible])


@pytest.mark.parametrize(
    ("devices", "parallel", "groups"),
    [(2, None, {"0,1", "2,3"}), ("2", 1, {"0,1"}), ([0, 1, 2], None, {"0,1,2"}), ("auto", 2, {"0", "1"})],
)
def test_trials_of_several_gpus(
    devices: object, parallel: int | None, groups: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "_devices", lambda: list("01234")[: 5 if devices != "auto" else 2])
    config = {"do": "go", "trainer": {"devices": devices}}
    found = [Trial(tmp_path / str(i), {**config, "seed": i}, [f"seed={i}"]) for i in range(3)]
    assert run_trials(found, tmp_path, parallel) == ["finished"] * 3
    assert {(t.folder / "device").read_text() for t in found} == groups


def test_trials_of_more_gpus_than_there_are_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "_devices", lambda: ["0", "1"])
    found = [Trial(tmp_path / "0", {"do": "go", "trainer": {"devices": 3}}, [])]
    with pytest.raises(UserError, match=r"has 2 for a trial.*trainer\.devices=3"):
        run_trials(found, tmp_path)


def test_an_interrupt_reaches_the_children_and_the_sweep_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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
    assert (
        f"0 of 2 trials are finished. To go on: the same command, with hydra.sweep.dir={tmp_path}"
        in caplog.text
    )
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


LAUNCH = """
import sys
from pathlib import Path
from embedlab.run import sweep
from tests.run.test_sweep import trials
sweep.RUNNER = ("tests.run.fake_trial",)
sweep._devices = list
sweep.run_trials(trials(Path(sys.argv[1]), *sys.argv[2:]), Path(sys.argv[1]), parallel=2)
"""


def ended(process: int) -> bool:
    """Whether a process is gone, or a zombie whose new parent has not looked."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def until(holds: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")
@pytest.mark.timeout(180)
def test_a_killed_launcher_takes_its_trials_along(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    command = [sys.executable, "-c", LAUNCH, str(tmp_path), "wait", "wait", "go"]
    with subprocess.Popen(command) as launcher_process:
        until(lambda: all((tmp_path / name / "ready").exists() for name in "01"))
        owners = [read_record(tmp_path / name / LOCK, Owner).process for name in "01"]
        launcher_process.kill()
    until(lambda: all(ended(owner) for owner in owners), seconds=20)
    for name in "01":  # killed as they were, they have written their checkpoints
        assert (tmp_path / name / "last.ckpt").exists()
        config = (tmp_path / name / "trial.yaml").read_text().replace("wait", "go")
        (tmp_path / name / "trial.yaml").write_text(config)
    with caplog.at_level("INFO"):
        assert run_trials(trials(tmp_path, "go", "go", "go"), tmp_path) == ["finished"] * 3
    assert all((tmp_path / name / "resumed").exists() for name in "01")
    assert [f"{n} of 3: {n - 1} finished" in caplog.text for n in (1, 2, 3)] == [True] * 3


def test_an_orphan_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hold = "\n".join([
        "import sys, time", "from pathlib import Path", "from embedlab.run.run_folder import owned",
        "with owned(Path(sys.argv[1]), 'folder'):", "    print('owns', flush=True)", "    time.sleep(2)",
        "    (Path(sys.argv[1]) / 'last.ckpt').touch()",
    ])  # fmt: skip
    run_trials(trials(tmp_path, "fail"), tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path / "0")], stdout=subprocess.PIPE, text=True
    ) as orphan:
        assert orphan.stdout is not None
        assert orphan.stdout.readline() == "owns\n"
        with caplog.at_level("INFO"):
            run_trials(trials(tmp_path, "fail"), tmp_path)
    assert f"{orphan.pid} on " in caplog.text
    assert "waiting for it" in caplog.text
    assert "ckpt_path: last" in (tmp_path / "0" / "resolved.yaml").read_text(), "it saw what the orphan left"


def test_a_sweep_says_how_far_it_is_and_what_failed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    some = [Trial(t.folder, t.config, ["lr=1", *t.overrides]) for t in trials(tmp_path, "go", "fail", "go")]
    with caplog.at_level("INFO"):
        run_trials(some, tmp_path)
        said = caplog.text
        caplog.clear()
        launcher.summarise(tmp_path, some)
    assert "started 1: seed=1" in said, "without what all trials share"
    assert all(f"{n} of 3: " in said for n in (1, 2, 3))
    assert "2 of 3: 1 failed" in said
    assert "1 of 3 trials failed:" in caplog.text
    assert f"1: seed=1 ({tmp_path / '1' / 'output.log'})" in caplog.text
