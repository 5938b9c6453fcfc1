"""The cost of scoring on a tiny run: both arms end, and the numbers belong together."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.dev_scoring import main


def test_a_scoring_and_its_share(
    tiny_run: Callable[[str], tuple[list[str], Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = tiny_run("dev_scoring")
    found = main([*run, "--batch", "4", "--pairs", "10", "--every", "2", "--step", "eager"])
    assert found["step_ms"] > 0
    assert found["share"] < 1
    assert json.loads(out.read_text())["scoring_ms"] == found["scoring_ms"]
    assert "% of the time" in capsys.readouterr().out
