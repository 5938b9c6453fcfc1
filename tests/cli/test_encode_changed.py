"""`embedlab encode` of an input that is not, or does not stay, what the folder was begun with."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import embedlab
from embedlab.cli.main import main


@pytest.fixture(scope="module")
def ckpt(tiny: Callable[..., Path]) -> Path:
    return tiny("bert")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """35 texts; parts of a single file have 10 rows."""
    monkeypatch.setattr("embedlab.cli.encode._KEPT", 10)
    (tmp_path / "in.txt").write_text("".join(f"a cat and {i}\n" for i in range(35)))
    return tmp_path / "in.txt"


def test_check_is_of_the_same_input(
    ckpt: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, copy = f"{tmp_path / 'parts'}/", tmp_path / "copy.txt"
    told = [f"ckpt={ckpt}", "part_rows=10"]
    assert main(["encode", str(source), out, *told]) == 0
    shutil.copy(source, copy)
    assert main(["encode", str(copy), out, *told, "check=true"]) == 0, "a copy is the same"
    copy.write_text(copy.read_text().replace("1", "2"))
    assert main(["encode", str(copy), out, *told, "check=true"]) == 2
    assert f"{copy} is another one now: its sha256 was " in capsys.readouterr().err


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize(("change", "what"), [("a\n", "sha256"), ("ab\n", "bytes"), ("a\nb\n", "bytes")])
def test_a_file_that_is_another_one_when_the_command_is_repeated_is_named(
    which: int, change: str, what: str, ckpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / f"{i}.txt" for i in range(3)]
    for file in files:
        file.write_text("x\n")
    command = ["encode", *map(str, files), f"{tmp_path / 'out'}/", f"ckpt={ckpt}"]
    assert main(command) == 0
    files[which].write_text(change)
    assert main(command) == 2
    line = capsys.readouterr().err
    assert f"{files[which]} is another one now: its {what} was " in line
    assert "Fix: the file that it was begun with, or another folder" in line


@pytest.mark.parametrize("change", ["longer", "replaced", "gone"])
@pytest.mark.parametrize("name", ["a.npy", "parts/"])
def test_an_input_that_changes_meanwhile(
    change: str, name: str, ckpt: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    inner, content, chunks = embedlab.SentenceEncoder.encode, source.read_text(), []

    def changing(self: Any, sentences: list[str], **options: Any) -> Any:
        chunks.append(1)
        if len(chunks) == 4:
            source.unlink()
            if change != "gone":
                source.write_text(content + "more\n" * (change == "longer"))
        return inner(self, sentences, **options)

    more = ["part_rows=10"] if name == "parts/" else []
    out = str(tmp_path / name) + "/" * bool(more)
    monkeypatch.setattr("embedlab.encoders.base.Encoder.encode", changing)
    assert main(["encode", str(source), out, f"ckpt={ckpt}", "device=cpu", "chunk=5", *more]) == 2
    assert "changed while it was read" in capsys.readouterr().err
    assert len(list((tmp_path / "parts").glob("part-*.json"))) == bool(more)
    assert not (tmp_path / "a.npy").exists()
