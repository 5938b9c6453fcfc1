from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra

from embedlab.cli.hydra_main import run, run_dir
from embedlab.errors import UserError

GIVEN = ["ckpt=mini", "input=a", "output=b"]
GUARD = "+hydra.callbacks.free_folder._target_=embedlab.cli.hydra_main.FreeFolder"


@pytest.fixture(autouse=True)
def here(conf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, and the small configuration."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    return folder


class Task:
    """Records what it was called with."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.configs: list[dict[str, Any]] = []
        self.folders: list[Path] = []
        self.argv: list[list[str]] = []
        self.error = error

    def __call__(self, config: dict[str, Any]) -> None:
        self.configs.append(config)
        self.folders.append(run_dir())
        self.argv.append(sys.argv)
        assert run_dir().is_dir()
        if self.error is not None:
            raise self.error


def job(task: Task) -> Any:
    def demo(config: dict[str, Any]) -> None:
        task(config)

    return demo


def test_the_task_gets_a_plain_dictionary_in_the_directory_it_was_called_from(here: Path) -> None:
    task = Task()
    assert run(job(task), "demo", [*GIVEN, "method=beta", "limit=3"]) == 0
    (config,) = task.configs
    assert type(config["method"]) is dict
    assert config["method"]["tau"] == 0.07
    assert config["label"] == "sts-3"
    assert "hydra" not in config
    assert Path.cwd() == here
    assert task.folders == [here / "runs/demo"]
    assert (here / "runs/demo/.hydra/config.yaml").is_file()


def test_the_run_folder_is_the_users_choice(tmp_path: Path) -> None:
    task = Task()
    run(job(task), "demo", [*GIVEN, f"hydra.run.dir={tmp_path}/mine"])
    assert task.folders == [tmp_path / "mine"]


@pytest.mark.parametrize("flag", [[], ["-m"]])
@pytest.mark.parametrize("name", [".hydra", ".hydra/config.yaml", "demo.log", "multirun.yaml"])
def test_nothing_is_written_through_a_link(tmp_path: Path, name: str, flag: list[str]) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    link = tmp_path / "run" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(victim)
    key = "hydra.sweep.dir" if flag else "hydra.run.dir"
    with pytest.raises(UserError, match=rf"{name}: is a link \({key}="):
        run(job(Task()), "demo", [*flag, *GIVEN, GUARD, f"{key}={tmp_path / 'run'}"])
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("flag", ["-m", "--multirun"])
def test_multirun(here: Path, flag: str) -> None:
    task = Task()
    run(job(task), "demo", [flag, *GIVEN, "limit=0,1", "method=alpha,beta"])
    assert [(c["limit"], c["method"]["name"]) for c in task.configs] == [
        (0, "alpha"),
        (0, "beta"),
        (1, "alpha"),
        (1, "beta"),
    ]
    assert task.folders == [here / f"runs/sweep/{i}" for i in range(4)]


def test_process_state_is_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    before = list(sys.argv)
    task = Task()
    run(job(task), "demo", GIVEN)
    with pytest.raises(UserError):
        run(job(task), "demo", [*GIVEN, "limt=1"])
    assert task.argv == [before]  # inside the task too: Lightning starts this command again for DDP
    assert sys.argv == before
    assert "HYDRA_FULL_ERROR" not in os.environ
    assert not GlobalHydra.instance().is_initialized()


def test_exceptions_arrive_as_they_are_and_hydra_adds_no_line(capfd: pytest.CaptureFixture[str]) -> None:
    error = RuntimeError("boom")
    with pytest.raises(RuntimeError) as caught:
        run(job(Task(error)), "demo", GIVEN)
    assert caught.value is error
    assert capfd.readouterr().err == ""


def test_the_traceback_ends_where_it_was_raised() -> None:
    with pytest.raises(RuntimeError) as caught:
        run(job(Task(RuntimeError("boom"))), "demo", GIVEN)
    assert caught.traceback[-1].name == "__call__"


def test_interrupt_and_exit_pass() -> None:
    for error in (KeyboardInterrupt(), SystemExit(1)):
        with pytest.raises(type(error)):
            run(job(Task(error)), "demo", GIVEN)


def test_a_failed_job_stops_hydras_own_sweep() -> None:
    with pytest.raises(RuntimeError, match="boom"):
        run(job(Task(RuntimeError("boom"))), "demo", ["-m", *GIVEN, "limit=0,1"])


def test_bad_input_leaves_no_run_folder(here: Path) -> None:
    with pytest.raises(UserError):
        run(job(Task(UserError("bad", fix="f"))), "demo", [*GIVEN, GUARD])
    assert not (here / "runs/demo").exists()


@pytest.mark.parametrize(
    "there",
    [
        [],
        ["last.ckpt"],
        ["todo.log"],
        [".hydra/"],
        [".hydra/notes.txt"],
        [".hydra"],
        ["demo.log", ".hydra/a/b"],
    ],
    ids=str,
)
def test_bad_input_leaves_what_was_there(here: Path, there: list[str]) -> None:
    folder = here / "runs/demo"
    folder.mkdir(parents=True)
    for name in there:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).mkdir() if name.endswith("/") else (folder / name).write_text("", "utf-8")
    before = sorted(folder.rglob("*"))
    with pytest.raises(UserError):
        run(job(Task(UserError("bad", fix="f"))), "demo", [*GIVEN, GUARD])
    assert sorted(folder.rglob("*")) == before


def test_a_failure_keeps_its_run_folder(here: Path) -> None:
    with pytest.raises(RuntimeError):
        run(job(Task(RuntimeError("boom"))), "demo", GIVEN)
    assert (here / "runs/demo/.hydra/overrides.yaml").exists()


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["limt=5"], "(limt=5). Fix: did you mean limit"),
        (["method.tua=1"], "(method.tua=1). Fix: did you mean method.tau"),
        (["method=gamma"], "(method=gamma). Fix: "),
        (["limit=1,2"], "a sweep needs -m"),
        (["limit=[1"], "(limit=[1)"),
        (["label=${nowhere}"], "Interpolation key 'nowhere' not found (label)"),
        (["ckpt=???"], "(ckpt). Fix: add ckpt=…"),
        (["--config-dir", "nowhere"], "nowhere"),
    ],
)
def test_a_bad_configuration_is_one_line(here: Path, argv: list[str], part: str) -> None:
    with pytest.raises(UserError) as caught:
        run(job(Task()), "demo", [*GIVEN, GUARD, *argv])
    line = str(caught.value)
    assert "\n" not in line
    assert part in line
    assert not (here / "runs/demo").exists()


def test_a_checkpoint_name_needs_no_quoting() -> None:
    task = Task()
    run(job(task), "demo", [*GIVEN[1:], "ckpt=epoch=3-step=10.ckpt"])
    assert task.configs[0]["ckpt"] == "epoch=3-step=10.ckpt"


def test_a_folder_of_the_users_own_adds_to_the_groups(here: Path) -> None:
    (here / "mine/method").mkdir(parents=True)
    (here / "mine/method/gamma.yaml").write_text("name: gamma\n", "utf-8")
    task = Task()
    run(job(task), "demo", ["--config-dir", "mine", *GIVEN, "method=gamma"])
    assert task.configs[0]["method"] == {"name": "gamma"}


@pytest.mark.parametrize("flags", [["--cfg", "job"], ["--help"]])
def test_hydras_flags(here: Path, capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    task = Task()
    with contextlib.suppress(SystemExit):
        run(job(task), "demo", [*flags, *GIVEN, "limit=77"])
    assert "limit: 77" in capsys.readouterr().out
    assert task.configs == []
    assert not (here / "runs").exists()


@pytest.mark.parametrize(("place", "told"), [
    ("a_file", r"is a file \(hydra.run.dir=.*Fix: a folder, or a path at which nothing is"),
    ("a_file/below", r"the folder cannot be made: .*\(hydra.run.dir=.*Fix: a path that does not lead through a file"),
])  # fmt: skip
def test_a_run_folder_that_cannot_be_made_is_one_line(
    here: Path, tmp_path: Path, place: str, told: str
) -> None:
    (tmp_path / "a_file").write_text("x")
    task = Task()
    with pytest.raises(UserError, match=told):
        run(job(task), "demo", [*GIVEN, f"hydra.run.dir={tmp_path / place}"])
    assert not task.configs


@pytest.mark.parametrize("value", ["null", "3", "true"])
def test_a_group_without_a_name_is_one_line(here: Path, value: str) -> None:
    with pytest.raises(UserError, match=rf"a group is chosen by a name \(method={value}\)"):
        run(job(Task()), "demo", [*GIVEN, f"method={value}"])
