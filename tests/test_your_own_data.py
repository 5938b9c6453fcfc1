"""docs/your-own-data.md is carried out: its tables are written, and its commands run."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embedlab.encoders.base import Encoder
from embedlab.encoders.codes import Codes
from embedlab.encoders.loading import load
from embedlab.evaluation.retrieval.beir import load_collection
from embedlab.evaluation.retrieval.retrieval import measure, search
from tests.test_extending import ROOT, carry_out

pytestmark = pytest.mark.timeout(900)
"""The page is a dozen commands, which a busy machine takes minutes for."""


def test_the_page_does_what_it_says(tmp_path: Path) -> None:
    """One test, since its commands take two minutes and processes that share the tests would each carry them out."""
    carry_out(ROOT / "docs" / "your-own-data.md", tmp_path)
    for run in ("answers", "both"):
        check_training(tmp_path, run)
    check_mining(tmp_path)
    check_shipping(tmp_path)


@dataclass
class Cut:
    """An encoder of which so many features are kept."""

    encoder: Encoder
    dim: int

    def encode(self, sentences: list[str]) -> Any:
        return self.encoder.encode(sentences, dim=self.dim)


def check_training(done: Path, run: str) -> None:
    folder = done / "runs" / run
    scores = json.loads((folder / "scores.json").read_text())
    with (folder / "metrics.csv").open() as file:
        dev = [float(row["dev/spearman"]) for row in csv.DictReader(file) if row.get("dev/spearman")]
    assert scores["scores"]["dev/spearman"] == pytest.approx(max(dev), abs=0.02)
    assert load(folder / "export").encode(["Where is my lamp?"]).shape == (1, 256)


def check_mining(done: Path) -> None:
    rows = [json.loads(line) for line in (done / "mined.jsonl").read_text().splitlines()]
    assert rows
    assert set(rows[0]) == {"anchor", "positive", "negative_1", "negative_2"}
    assert all(row["positive"] not in (row["negative_1"], row["negative_2"]) for row in rows)
    assert load(done / "runs/mined/export").dim == 256


def check_shipping(done: Path) -> None:
    encoder = load(done / "runs/both/export")
    texts = (done / "answers.txt").read_text().splitlines()
    exported = load(done / "shipped")
    np.testing.assert_allclose(exported.encode(texts), encoder.encode(texts), atol=1e-5)
    kept = encoder.encode(texts, dim=64, normalize=True)
    np.testing.assert_allclose(np.load(done / "vectors.npy"), kept, atol=1e-5)
    codes = Codes("int8", 64, np.load(done / "ranges.npy"))
    decoded = codes.decode(np.load(done / "small.npy"))
    assert np.abs(decoded - kept).max() <= codes.scale.max() / 2 + 1e-5
    scores = [
        json.loads((done / f"scores/{n}.json").read_text())["scores"]["shop/ndcg@10"]
        for n in ("whole", "small")
    ]
    collection = load_collection(done / "shop")
    for dim, score in zip((256, 64), scores, strict=True):
        floats = measure(search(Cut(encoder, dim), collection, 100), collection.qrels)["ndcg@10"]
        assert score == pytest.approx(floats, abs=2)
    assert len(json.loads((done / "latency.json").read_text())["rows"]) == 2
