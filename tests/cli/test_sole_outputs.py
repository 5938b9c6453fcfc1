"""Commands that write one place at once, and places that a command did not make: refused, and nothing is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embedlab.cli.main import main
from embedlab.corpus.search import Index
from tests.encoders.test_encoder import build
from tests.support import SENTENCES

pytest.importorskip("faiss", reason="faiss (extra faiss) is not installed")


def seen(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def names(tmp_path: Path, tiny: Callable[..., Path]) -> dict[str, Path]:
    build(tiny("bert")).save(tmp_path / "encoder")
    (tmp_path / "in.txt").write_text("\n".join(SENTENCES) + "\n")
    rows = [json.dumps({"query": a, "pos": b}) for a, b in zip(SENTENCES[:8], SENTENCES[8:], strict=True)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows) + "\n")
    np.save(tmp_path / "in.npy", np.random.default_rng(0).normal(size=(200, 16)).astype(np.float32))
    (tmp_path / "outputs").mkdir()
    return {"in": tmp_path / "in", "pairs": tmp_path / "pairs.jsonl", "out": tmp_path / "outputs" / "a",
            "encoder": tmp_path / "encoder"}  # fmt: skip


def told(command: str, names: dict[str, Path]) -> list[str]:
    return [part.format(**names) for part in command.split()]


# two at once

AT_ONCE = {
    "search index {in}.txt {out} ckpt={encoder}": "embedlab.corpus.search._finished",
    "search index {in}.txt {out} ckpt={encoder} overwrite=true": "embedlab.corpus.search._finished",
    "search index {in}.npy {out}": "embedlab.corpus.search._finished",
    "search index {in}.npy {out} kind=ivf_flat": "embedlab.corpus.approximate.build",
    "export to=hf out={out} ckpt={encoder}": "embedlab.cli.export._check_difference",
    "export to=hf out={out} ckpt={encoder} overwrite=true": "embedlab.cli.export._check_difference",
    "mine {pairs} {out}.jsonl ckpt={encoder} device=cpu": "embedlab.corpus.mine.write_pairs",
    "mine {pairs} {out}.jsonl ckpt={encoder} device=cpu work={in}.work": "embedlab.corpus.mine.write_pairs",
    "encode {in}.txt {out}.npy ckpt={encoder}": "embedlab.corpus.encode.join_parts",
}


@pytest.mark.parametrize("command", AT_ONCE)
def test_the_second_of_two_is_refused(
    command: str, names: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second one begins, and ends, in the middle of the first."""
    module, _, name = AT_ONCE[command].rpartition(".")
    inner, refused = getattr(sys.modules.get(module) or __import__(module, fromlist=["_"]), name), []

    def meanwhile(*given: Any, **options: Any) -> Any:
        if not refused:
            refused.append(0)
            capsys.readouterr()
            again = command.replace(" work={in}.work", " work={in}.other")
            refused[0] = main(told(again, names))
            (line,) = [e for e in capsys.readouterr().err.splitlines() if e.startswith("embedlab: ")]
            assert f"{names['out']}" in line
            assert "another process writes it" in line
        return inner(*given, **options)

    monkeypatch.setattr(AT_ONCE[command], meanwhile)
    assert main(told(command, names)) == 0
    assert refused == [2]
    assert {p.name.partition(".")[0] for p in names["out"].parent.iterdir()} == {"a"}


@pytest.mark.parametrize("command", ["search index {in}.npy {out}", "export to=hf out={out} ckpt={encoder}"])
def test_what_others_put_there_meanwhile_stays(
    command: str, names: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    where = AT_ONCE.get(command) or AT_ONCE[f"{command} overwrite=true"]
    module, _, name = where.rpartition(".")
    inner = getattr(__import__(module, fromlist=["_"]), name)

    def meanwhile(*given: Any, **options: Any) -> Any:
        names["out"].mkdir()
        (names["out"] / "thesis.txt").write_text("years of work")
        return inner(*given, **options)

    monkeypatch.setattr(where, meanwhile)
    assert main(told(command, names)) == 2
    (line,) = [e for e in capsys.readouterr().err.splitlines() if e.startswith("embedlab: ")]
    assert line.startswith(f"embedlab: {names['out']}: directory not empty. Fix: another path")
    assert seen(names["out"].parent) == {"a/thesis.txt": b"years of work"}


def test_of_two_processes_one_builds_the_index(names: dict[str, Path]) -> None:
    sources = [names["in"].with_name(f"{name}.npy") for name in "xy"]
    for i, source in enumerate(sources):
        np.save(source, np.full((1000, 8), i + 1, np.float32) + np.eye(1000, 8, dtype=np.float32))
    command = [sys.executable, "-m", "embedlab", "search", "index"]
    started = [
        subprocess.Popen(
            [*command, source, names["out"]], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        for source in sources
    ]
    said = [process.communicate()[1] for process in started]
    statuses = [process.returncode for process in started]
    assert sorted(statuses) == [0, 2], said
    assert said[statuses.index(2)].count("\n") == 1
    assert Index(names["out"]).info.parts == [str(sources[statuses.index(0)].resolve())]
    assert [p.name for p in names["out"].parent.iterdir()] == ["a"]


# what a command did not make

PLACES = {
    "encode {in}.txt {out}.npy ckpt={encoder}": (".a.npy.parts", "manifest.json", "part-000000.npy"),
    "encode {in}.txt {out}.parquet ckpt={encoder}": (".a.parquet.parts", "manifest.json", "part-000000.json"),
    "mine {pairs} {out}.jsonl ckpt={encoder} device=cpu": ("a.jsonl.work", "settings.json", "texts"),
    "mine {pairs} {out}.jsonl ckpt={encoder} device=cpu work={out}": ("a", "settings.json", "texts"),
    "search index {in}.npy {out} kind=ivf_flat work={out}.w": ("a.w", "build.json", "trained.faiss"),
}
FAILS = {
    "encode": "embedlab.corpus.encode.encode_parts",
    "mine": "embedlab.corpus.mine.write_pairs",
    "search": "embedlab.corpus.approximate._train",
}


FILES = (["thesis.txt"], ["notes/thesis.txt"], ["{lock}", "thesis.txt"], ["{part}"], ["{mark}"],
         ["{mark}", "thesis.txt"], ["{mark}", "{part}", ".git"])  # fmt: skip


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("files", FILES, ids=" ".join)
@pytest.mark.parametrize("command", PLACES)
def test_a_folder_that_a_command_did_not_make_is_kept(
    command: str, files: list[str], fails: bool, names: dict[str, Path], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Whether the command could do its work or not, what lay in the place of its own work is there afterwards."""
    place, mark, part = PLACES[command]
    lock = ".lock" if command.startswith("encode") else "lock"
    for file in files:
        path = names["out"].parent / place / file.format(mark=mark, part=part, lock=lock)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"name": "another program"}')
    before = seen(names["out"].parent)
    if fails:
        monkeypatch.setattr(FAILS[command.split()[0]], lambda *_, **__: 1 / 0)
    assert main(told(command, names)) == 2
    (line,) = [e for e in capsys.readouterr().err.splitlines() if e.startswith("embedlab: ")]
    assert f"{names['out'].parent / place}" in line
    assert ". Fix: " in line
    assert seen(names["out"].parent) == before
