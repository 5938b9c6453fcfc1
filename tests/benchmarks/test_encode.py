"""Encoding on a tiny model: every arm has a rate, and the arms' vectors are the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.encode import KINDS, main


def test_every_arm_has_a_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    main(["--layers", "1", "--width", "64", "--n", "70", "--rounds", "1", "--profile", "--json", str(out),
          "--before", str(Path(__file__).parents[2])])  # fmt: skip
    found = json.loads(out.read_text())
    for kind, (_, fewest, most) in KINDS.items():
        assert fewest < found[kind]["tokens"] <= most + 3
        assert all(rate > 0 for rate in found[kind]["texts_per_second"].values())
        assert found[kind]["ratio_before"] > 0
        assert found[kind]["least_cosine_padded"] > 1 - 1e-5
        assert found[kind]["least_cosine_sentence_transformers"] > 1 - 1e-5
    printed = capsys.readouterr().out
    assert "packed / padded" in printed
    assert "Self CPU" in printed
