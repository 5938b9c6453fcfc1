"""The table of stores: scores of the suite, sizes of the codes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.stores import markdown, measured
from embedlab.encoders.codes import STORES
from embedlab.evaluation.core.vectors import Vectors
from embedlab.evaluation.retrieval.beir import load_collection
from embedlab.evaluation.retrieval.retrieval import measure, search
from tests.evaluation.helpers import HashedWords
from tests.evaluation.test_retrieval import write_collection


def test_a_row_is_what_the_suite_gives(tmp_path: Path) -> None:
    pytest.importorskip("ir_measures", reason="extra eval")
    collection = load_collection(write_collection(tmp_path / "demo"))
    encoder = HashedWords()
    queries, documents = (Vectors(encoder, t.values()) for t in (collection.queries, collection.documents))
    rows = [measured(queries, documents, collection, dim, store, 100) for dim in (64, 12) for store in STORES]
    whole = measure(search(encoder, collection, 100), collection.qrels)
    assert rows[0]["ndcg@10"] == pytest.approx(whole["ndcg@10"], abs=0.01)
    assert [row["bytes"] for row in rows[:6]] == [256, 128, 64, 64, 8, 8]
    assert [row["bytes"] for row in rows[6:]] == [48, 24, 12, 12, 2, 2]
    assert rows[2]["ndcg@10"] == pytest.approx(whole["ndcg@10"], abs=0.01)
    table = markdown(rows).splitlines()
    assert len(table) == 2 + len(rows)
    assert "| 64 | float32 | 256 |" in table[2]
    assert "| 100.0% |" in table[2]
