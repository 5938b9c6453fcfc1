"""docs/your-own-data.md is carried out: its tables are written, and its commands run."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from embedlab.encoders.loading import load
from tests.test_extending import ROOT, carry_out


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    carry_out(ROOT / "docs" / "your-own-data.md", folder)
    return folder


@pytest.mark.parametrize("run", ["answers", "both"])
def test_the_page_trains_what_it_says(done: Path, run: str) -> None:
    folder = done / "runs" / run
    scores = json.loads((folder / "scores.json").read_text())
    with (folder / "metrics.csv").open() as file:
        dev = [float(row["dev/spearman"]) for row in csv.DictReader(file) if row.get("dev/spearman")]
    assert scores["scores"]["dev/spearman"] == pytest.approx(max(dev), abs=0.02)
    assert load(folder / "export").encode(["Where is my lamp?"]).shape == (1, 256)
