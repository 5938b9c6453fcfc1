"""The cost of scoring on a tiny run: both arms end, and the numbers belong together."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.dev_scoring import main
from tests.training.conftest import sentences


def test_a_scoring_and_its_share(
    tiny: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tiny("bert", width=32, heads=2, ffn=64)
    monkeypatch.setattr("benchmarks.dev_scoring.architecture", lambda *_: folder)
    (tmp_path / "text.txt").write_text("\n".join(sentences(80)), encoding="utf-8")
    out = tmp_path / "out.json"
    run = ["--backbone", str(folder), "--sentences", str(tmp_path / "text.txt"), "--json", str(out)]
    found = main([*run, "--batch", "4", "--pairs", "10", "--every", "2", "--step", "eager"])
    assert found["step_ms"] > 0
    assert found["share"] < 1
    assert json.loads(out.read_text())["scoring_ms"] == found["scoring_ms"]
    assert "% of the time" in capsys.readouterr().out
