"""The speeds of encoders: what is encoded, weighed and counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import embedlab
from benchmarks.box import main


def test_each_encoder_has_a_record(tiny: Callable[..., Path], tmp_path: Path) -> None:
    pytest.importorskip("gensim", reason="extra quickstart")
    folder = tmp_path / "small"
    embedlab.load(tiny("bert")).save(folder)
    main([str(folder), "mini-sentence", "--sentences", "8", "--rounds", "2", "--json", str(tmp_path / "out")])
    small, shipped = json.loads((tmp_path / "out").read_text())["encoders"]
    assert (small["encoder"], shipped["encoder"]) == ("small", "mini-sentence")
    assert small["megabytes"] == sum(file.stat().st_size for file in folder.iterdir()) / 1e6
    assert shipped["blocks"] == 12
    assert 14 < shipped["megabytes"] < 14.7
    for row in (small, shipped):
        assert row["fastest"] >= row["median"] > 0
        assert row["per_processor_second"] > 0
    assert small["parameters"] < shipped["parameters"]
