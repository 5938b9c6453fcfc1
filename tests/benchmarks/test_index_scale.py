"""The benchmark of a large index runs, measures and holds its limit, on few rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("faiss")
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("limit", "status"), [(6.0, 0), (0.01, 1)])
def test_it_measures_a_small_index(limit: float, status: int, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "benchmarks.index_scale", "--rows", "10000", "--dim", "16", "--threads", "1",
        "--work", str(tmp_path), "--json", str(tmp_path / "out.json"), f"--limit={limit}", "m=4",
    ]  # fmt: skip
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == status
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["within_limit"] == (status == 0)
    assert found["queries_1000"]["lines"] == 10_000
    assert 0.01 < found["build"]["anonymous_gib"] <= found["build"]["resident_gib"]
    recall = [point["recall@10"] for point in found["lists"]["recall"]]
    assert recall == sorted(recall)
    assert recall[-1] > 0.9
    assert found["arithmetic"][1]["codes_and_numbers"] == pytest.approx(7.2)
