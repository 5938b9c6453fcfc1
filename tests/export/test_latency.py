"""`embedlab benchmark`: what is measured is what it says; how long anything takes is not tested."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import embedlab
from embedlab.cli.main import main
from embedlab.export.latency import hardware, texts_of


@pytest.mark.parametrize("length", [8, 16, 40])
@pytest.mark.parametrize("n", [1, 32])
def test_texts_are_distinct_and_about_as_long_as_asked_for(
    tiny: Callable[..., Path], length: int, n: int
) -> None:
    encoder = embedlab.load(tiny("bert"))
    texts = texts_of(encoder, length, n, 3)
    assert len(set(texts)) == n
    tokens = [len(ids) for ids in encoder.tokenization.ids(texts)]
    assert max(tokens) <= length
    assert sum(tokens) / n > 0.6 * length
    assert texts == texts_of(encoder, length, n, 3) != texts_of(encoder, length, n, 4)


def test_a_table_and_a_file(
    tiny: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason=f"{package} (extra onnx) is not installed")
    out = tmp_path / "latency.json"
    arguments = [
        "batch_size=1,3",
        "length=8,12",
        "format=torch,onnx-int8",
        "calls=2",
        "threads=1",
        "device=cpu",
    ]
    assert main(["benchmark", f"ckpt={tiny('bert')}", *arguments, f"out={out}", "dim=16"]) == 0
    content = json.loads(out.read_text())
    rows = content["rows"]
    cells = [(r["format"], r["batch_size"], r["length"]) for r in rows]
    assert cells == [(f, b, n) for f in ("torch", "onnx-int8") for b in (1, 3) for n in (8, 12)]
    for row in rows:
        assert 0 < row["p50"] <= row["p95"] <= row["p99"]
        assert row["texts_per_second"] > 0
        assert row["memory_mb"] > 0
        assert 3 <= row["tokens"] <= row["length"]
        assert row["device"] == "cpu"
    assert [r["cosine"] for r in rows[:4]] == pytest.approx([1] * 4, abs=1e-6)
    assert all(0.5 < r["cosine"] < 0.999999 for r in rows[4:])
    assert content["hardware"] == hardware()
    assert content["calls"] == 2
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split()[:3] == ["format", "device", "threads"]
    assert len(printed) == 2 + len(rows) + 2  # heads and a rule; a blank line and the file


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("format=tensorrt", "format=tensorrt"),
        ("batch_size=0", "batch_size=0"),
        ("batch_size=[]", "no number is given (batch_size)"),
        ("length=4", "(length=4). Fix: 8 or more"),
        ("length=1.5,16", "length=1.5"),
        ("threads=0", "threads=0"),
        ("calls=0", "calls=0"),
        ("dim=33", "exceeds width 32 (dim=33)"),
        ("out=/proc/none/x.json", "cannot be written"),
    ],
)
def test_what_cannot_be_measured(
    tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str], argument: str, told: str
) -> None:
    assert main(["benchmark", f"ckpt={tiny('bert')}", "device=cpu", argument]) == 2
    line = capsys.readouterr().err
    assert told in line
    assert line.count("\n") == 1
