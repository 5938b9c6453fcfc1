"""A run's folder has one owner: a second process is refused before it changes anything there."""

from __future__ import annotations

import errno
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from embedlab.cli import main as command
from embedlab.errors import UserError
from embedlab.run import run_folder
from embedlab.run.run_folder import LOCK, holds_run, owned, run_around

HOLD = """
import os, sys, time
from pathlib import Path
from embedlab.run.run_folder import owned
with owned(Path(sys.argv[1]), "folder"):
    if os.fork() == 0:  # as the workers of a loader; it says so, since a fork lets the lock go as it begins
        print("owns", flush=True)
        time.sleep(60)
        os._exit(0)
    time.sleep(60)
"""


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def until(holds: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def arguments(
    tiny: Callable[..., Path], text_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[str]:
    """Of `embedlab train` for a tiny run, whose checkpoints come at every step."""
    os.environ["EMBEDLAB_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    return ["backbone=local", f"backbone.path={tiny('bert')}", f"data.files={text_file}", "trainer=cpu",
            "data.batch_size=8", "trainer.max_steps=6", "callbacks.progress=none", "evaluation.final=[]",
            "evaluation.before=false", "callbacks.checkpoint.every_steps=1", "data.report=false"]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def begin(*words: str) -> subprocess.Popen[str]:
    process = [sys.executable, "-m", "embedlab", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        process, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture(scope="module")
def living(arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """The folder of a run that is stopped in its middle, and its process; at the end it goes on, unharmed."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    process = begin("train", *arguments, "seed=1", f"hydra.run.dir={folder}")
    try:
        until((folder / "last.ckpt").exists, process)
        os.kill(process.pid, signal.SIGSTOP)
        yield folder, process.pid
    finally:
        os.kill(process.pid, signal.SIGCONT)
        _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert yaml.safe_load((folder / "config.yaml").read_text())["seed"] == 1
    assert json.loads((folder / "scores.json").read_text())["training"]["seed"] == 1
    assert json.loads((folder / "scores.json").read_text())["training"]["steps"] == 6
    assert not list(folder.glob(LOCK)), "gone with its owner"


SECOND = {
    "train": ["train", "ARGUMENTS", "seed=2", "hydra.run.dir=RUN"],
    "resume": ["train", "ARGUMENTS", "seed=1", "ckpt_path=last", "hydra.run.dir=RUN"],
    "resume or begin": ["train", "ARGUMENTS", "ckpt_path=auto", "hydra.run.dir=RUN"],
    "two ranks": ["train", "ARGUMENTS", "trainer.devices=2", "ckpt_path=last", "hydra.run.dir=RUN"],
    "a sweep in it": ["train", "-m", "ARGUMENTS", "seed=1,2", "hydra.sweep.dir=RUN"],
    "evaluate": ["evaluate", "ckpt=RUN", "suite=lee"],
    "evaluate its checkpoint": ["evaluate", "ckpt=RUN/last.ckpt", "suite=lee"],
    "evaluate into it": ["evaluate", "ckpt=mini", "suite=lee", "out=RUN/mini.json"],
    "report": ["report", "RUN"],
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("second", SECOND)
def test_a_second_owner_is_refused(
    second: str, living: tuple[Path, int], arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, owner = living
    before = contents(folder)
    words = [part for word in SECOND[second] for part in (arguments if word == "ARGUMENTS" else [word])]
    assert command.main([word.replace("RUN", str(folder)) for word in words]) == 2
    error = capsys.readouterr().err
    assert f"{folder}: is in use by {owner} on {platform.node()}: " in error
    assert f" train {arguments[0]}" in error
    assert "or wait" in error
    assert error.count("\n") == 1
    assert contents(folder) == before


@pytest.mark.timeout(300)
def test_of_two_at_once_one_wins(arguments: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    both = {seed: begin("train", *arguments, f"seed={seed}", f"hydra.run.dir={folder}") for seed in (1, 2)}
    errors = {seed: process.communicate()[1] for seed, process in both.items()}
    ended = {seed: process.returncode for seed, process in both.items()}
    assert sorted(ended.values()) == [0, 2], errors
    (winner,) = [seed for seed, status in ended.items() if status == 0]
    assert yaml.safe_load((folder / "config.yaml").read_text())["seed"] == winner
    assert json.loads((folder / "scores.json").read_text())["training"]["seed"] == winner
    assert errors[3 - winner].count("\n") == 1
    assert ("is in use by" in errors[3 - winner]) or ("holds a run already" in errors[3 - winner])


def test_a_killed_owner_frees_the_folder_though_its_children_live(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "owns\n"
            with pytest.raises(UserError, match=f"in use by {process.pid} on "), owned(folder, "folder"):
                pass
            process.kill()
            process.wait()
            with owned(folder, "folder"):
                assert json.loads((folder / LOCK).read_text())["process"] == os.getpid()
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    assert not (folder / LOCK).exists()


def test_it_is_owned_again_within_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with owned(folder, "folder"), owned(folder / ".." / "run", "folder"):
        assert (folder / LOCK).is_file()
    assert not folder.exists()
    folder.mkdir()
    with pytest.raises(RuntimeError), owned(folder, "folder"):
        raise RuntimeError
    assert list(folder.iterdir()) == []


def test_an_owner_on_another_machine_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / LOCK).write_text(json.dumps({"process": 7, "host": "elsewhere", "command": "train\x1b[2J"}))
    with owned(tmp_path, "folder"):
        pass
    assert "was left by 7 on elsewhere: train\\x1b[2J" in caplog.text


def test_without_locks_the_run_goes_on_with_what_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    owner = {"process": os.getppid(), "host": platform.node(), "command": "embedlab train"}
    (tmp_path / LOCK).write_text(json.dumps(owner))
    monkeypatch.setattr("fcntl.flock", none)
    with owned(tmp_path, "folder"):
        pass
    assert "no file locks" in caplog.text
    assert f"was left by {os.getppid()} on" in caplog.text


@pytest.mark.parametrize("content", ["", "{", "[]", '{"process": "x"}', '{"process": 1}'])
def test_a_damaged_lock_is_taken_or_names_nobody(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder.time, "sleep", lambda _: None)
    (tmp_path / LOCK).write_text(content)
    with owned(tmp_path, "folder"):
        run_folder._held.clear()  # as another process
        (tmp_path / LOCK).write_text(content)
        with pytest.raises(UserError, match="in use by another process"), owned(tmp_path, "folder"):
            pass


@pytest.mark.parametrize(
    ("there", "found"),
    [
        ({}, False),
        ({"last.ckpt": ""}, True),
        ({"previous.ckpt": ""}, True),
        ({LOCK: json.dumps({"process": 1, "host": "a", "command": "b"})}, True),
        ({LOCK: "1234"}, False),  # pytest's
        ({LOCK: ""}, False),
        ({"config.yaml": "", "scores.json": ""}, False),
    ],
)
def test_what_is_a_runs_folder(there: dict[str, str], found: bool, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name, content in there.items():
        (run / name).write_text(content)
    assert holds_run(run) == found
    for inside in ("x.json", "scores/x.json", "export/scores/x.json"):
        assert run_around(run / inside) == (run if found else None)
    assert run_around(run / "a/b/c/x.json") is None


def test_other_ranks_leave_the_lock_to_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with owned(tmp_path / "run", "folder"):
        assert not (tmp_path / "run").exists()
