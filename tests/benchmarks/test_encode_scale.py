"""Encoding a corpus with drawn vectors: all lines are encoded, and memory is known by how many."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import encode_scale


def test_lines_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.json"
    told = ["--lines", "3000", "--part-rows", "100", "--processes", "2", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["encode_scale", *told])
    encode_scale.main()
    found = json.loads(out.read_text())
    assert found["lines_encoded"] == 3000
    assert found["lines_per_second"] > 0
    assert all(memory > 1 << 26 for memory in found["resident_bytes_by_lines"].values())
    assert found["output_bytes"] > 3000 * 256 * 2
