"""An output that cannot be written is said at once, in one line, before any weight is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from embedlab.cli.main import main
from embedlab.errors import UserError
from embedlab.files import check_writable


def test_folders_above_need_not_exist_and_are_not_made(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b" / "scores.json")
    check_writable(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(
        UserError, match=r"scores\.json: cannot be written \(.*file: Not a directory\) \(out\)"
    ):
        check_writable(tmp_path / "file" / "scores.json")
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize(
    "arguments",
    [
        ["evaluate", "ckpt=mini", "suite=lee", "out={file}/scores.json"],
        ["evaluate", "ckpt=mini", "suite=lee", "out={file}"],
        ["evaluate", "ckpt=mini", "suite=lee", "out=/proc/no/scores.json"],
        ["evaluate", "ckpt=mini", "suite=lee", "out={folder}.json"],
        ["export", "ckpt=mini", "to=hf", "out={file}/export"],
        ["export", "ckpt=mini", "to=hf", "out=/proc/export"],
        ["search", "index", "{file}", "{file}/index", "ckpt=mini"],
        ["search", "index", "{file}", "/proc/index", "ckpt=mini"],
    ],
    ids=" ".join,
)
def test_commands(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("embedlab.load", lambda *_: pytest.fail("weights were loaded first"))
    (tmp_path / "file.txt").write_text("a cat\n")
    (tmp_path / "scores.json").mkdir()
    names = {"file": tmp_path / "file.txt", "folder": tmp_path / "scores"}
    assert main([argument.format(**names) for argument in arguments]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "cannot be written" in line or "is a folder" in line
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file.txt", "scores.json"]
    assert (tmp_path / "file.txt").read_text() == "a cat\n"
