"""What the ranks of one command say together, and what is said before there are any."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from embedlab.cli import main as command
from embedlab.cli import train
from embedlab.console import SAID, say_once
from embedlab.run import processes

FEW = [f"line {i} of the text" for i in range(20)]


@pytest.fixture
def arguments(tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`embedlab train` on two devices, with fewer rows than a batch has."""
    monkeypatch.setenv("EMBEDLAB_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "few.txt"
    text.write_text("\n".join(FEW) + "\n")
    return ["train", "backbone=local", f"backbone.path={tiny('bert')}", f"data.files={text}", "trainer=cpu",
            "trainer.devices=2", "evaluation.final=[]", f"hydra.run.dir={tmp_path / 'run'}"]  # fmt: skip


@pytest.mark.parametrize(
    ("more", "key"),
    [
        (["data.batch_size=6"], "data.batch_size=6"),
        (["trainer.devices=11", "data.drop_last=false"], "devices=11"),
    ],
)
def test_too_few_rows_are_said_before_processes_start(arguments, more, key, monkeypatch, capsys):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(train, "start_ranks", lambda *_: pytest.fail("processes were started"))
    assert command.main([*arguments, "data.limit=10", *more]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "10 rows are less than one" in error
    assert key in error


def test_a_file_that_is_missing_is_said_before_too_few_rows(arguments, monkeypatch, capsys):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(train, "start_ranks", lambda *_: pytest.fail("processes were started"))
    for more in ([], ["ckpt_path=auto"]):
        assert (
            command.main([*arguments, "data.limit=10", "data.batch_size=6", "data.files=/nowhere.txt", *more])
            == 2
        )
        assert "no such file (data.files=/nowhere.txt)" in capsys.readouterr().err


@pytest.mark.timeout(600)
def test_ranks_that_meet_the_same_error_say_it_once(arguments, capfd):  # type: ignore[no-untyped-def]
    assert command.main([*arguments, "data.batch_size=11"]) == 2
    assert capfd.readouterr().err.count("embedlab: 20 rows are less than one batch of 22 on 2 devices") == 1


def test_what_differs_between_ranks_is_said_too(tmp_path, monkeypatch, capsys):  # type: ignore[no-untyped-def]
    monkeypatch.setenv(SAID, str(tmp_path / "said"))
    for line in ("one", "another", "one"):
        say_once(line)
    monkeypatch.delenv(SAID)
    say_once("one")
    assert capsys.readouterr().err == "one\nanother\none\n"
    assert SAID not in processes._environment(0, 2)
