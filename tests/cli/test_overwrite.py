"""One rule: an output that a command was given and that is there is kept, unless overwrite=true says otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from embedlab.cli.compose import _CLOSED
from embedlab.files import conf_dir
from tests.test_refused_places import CASES, seen
from tests.test_refused_places import home as home
from tests.test_refused_places import run as run

GO_ON = ("encode parts", "quantize parts")
"""Folders of parts: what is there is gone on with, and nothing is replaced."""
RESUMED = ("distil",)
"""A run's folder, by ckpt_path."""
WRITERS = [name for name in CASES if name not in (*GO_ON, *RESUMED)]


@pytest.mark.parametrize("name", WRITERS)
def test_what_is_there_is_kept(
    name: str, run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").mkdir()
    assert run(name, tmp_path / "there") == 0
    before = seen(tmp_path / "there")
    assert before
    capsys.readouterr()
    assert run(name, tmp_path / "there") == 2
    (line,) = [e for e in capsys.readouterr().err.splitlines() if e.startswith("embedlab: /")]
    assert "already (overwrite=false). Fix: overwrite=true, or another " in line
    assert str(tmp_path / "there" / "a") in line
    assert seen(tmp_path / "there") == before
    assert run(name, tmp_path / "there", "overwrite=true") == 0
    assert seen(tmp_path / "there").keys() == before.keys()


@pytest.mark.parametrize("name", GO_ON)
def test_a_folder_of_parts_goes_on_and_is_not_replaced(
    name: str, run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").mkdir()
    assert run(name, tmp_path / "there") == 0
    before = seen(tmp_path / "there")
    assert run(name, tmp_path / "there") == 0
    assert seen(tmp_path / "there") == before
    assert run(name, tmp_path / "there", "overwrite=true") == 2
    assert "a folder of parts is not replaced (overwrite=true). Fix: leave it out" in capsys.readouterr().err
    assert seen(tmp_path / "there") == before


def test_every_command_that_is_given_an_output_has_the_key() -> None:
    """And is among those above."""
    written = {}
    for name in (*_CLOSED, "evaluate"):
        keys = yaml.safe_load((conf_dir() / f"{name}.yaml").read_text(encoding="utf-8"))
        outputs = {"out", "output"} | ({"index"} if name == "search_index" else set())
        if outputs & keys.keys():
            written[name] = keys.get("overwrite")
    assert set(written.values()) == {False}
    commands = {" ".join(case.command.split()[:2]) for case in CASES.values()}
    for name in written:
        assert any(command.startswith(name.replace("_", " ")) for command in commands), name
