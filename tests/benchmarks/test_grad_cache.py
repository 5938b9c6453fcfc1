"""The cost of cached gradients on a tiny run: an arm for the whole batch and one for each chunk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.grad_cache import main


def test_a_row_for_each_chunk(
    tiny_run: Callable[[str], tuple[list[str], Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = tiny_run("grad_cache")
    assert main([*run, "--batch", "8", "--chunks", "4,2", "--steps", "6", "--step", "eager"]) == 0
    arms = json.loads(out.read_text())["arms"]
    assert [arm["chunk"] for arm in arms] == [None, 4, 2]
    assert arms[0]["ratio"] == 1.0
    assert all(arm["seconds"] > 0 for arm in arms)
    assert "chunks of 2" in capsys.readouterr().out
