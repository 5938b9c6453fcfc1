"""Retrieval scored while training: the suite's own nDCG@10, whatever the vectors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from embedlab.evaluation.retrieval.beir import Collection
from embedlab.evaluation.retrieval.dev import DevRetrieval
from embedlab.evaluation.retrieval.retrieval import measure, search


def collection(documents: int = 30, queries: int = 7, seed: int = 0) -> Collection:
    draw = np.random.RandomState(seed)
    texts = {f"d{i}": f"document {i}" for i in range(documents)}
    asked = {f"q{i}": f"question {i}" for i in range(queries)}
    qrels = {
        query: {
            f"d{i}": int(draw.randint(1, 4))
            for i in draw.choice(documents, draw.randint(1, 15), replace=False)
        }
        for query in asked
    }
    return Collection("own", "x", "dev", texts, asked, qrels, 0)


class Fixed:
    def __init__(self, dev: DevRetrieval, vectors: torch.Tensor) -> None:
        self.rows = dict(zip(dev.sentences, vectors, strict=True))

    def encode(self, sentences):  # type: ignore[no-untyped-def]
        return torch.stack([self.rows[text] for text in sentences])


@pytest.mark.parametrize("seed", range(4))
def test_it_is_the_score_of_the_suite(seed: int) -> None:
    pytest.importorskip("ir_measures")
    data = collection(seed=seed)
    dev = DevRetrieval(data)
    vectors = torch.randn(len(dev.sentences), 5, generator=torch.Generator().manual_seed(seed))
    expected = measure(search(Fixed(dev, vectors), data), data.qrels)["ndcg@10"]  # type: ignore[arg-type]
    found = dev.score(vectors)
    assert found["ndcg@10"] == pytest.approx(expected, abs=1e-9)
    assert set(found) == {"ndcg@10", "mean_cosine", "effective_rank"}
    assert set(dev.score(vectors, rank=False)) == {"ndcg@10", "mean_cosine"}


@pytest.mark.parametrize("documents", [12, 500, 5000])
def test_of_equal_documents_the_first_are_found(documents: int) -> None:
    """`Tensor.topk` takes any of them, others by the number of documents."""
    texts = {f"d{i}": f"document {i}" for i in range(documents)}
    for first in (0, 2, documents - 10):
        judged = {f"d{i}": 1 for i in range(first, first + 10)}
        dev = DevRetrieval(Collection("own", "x", "dev", texts, {"q": "question"}, {"q": judged}, 0))
        vectors = torch.eye(2)[[0] * documents + [1]] + 1  # a collapsed corpus
        hits = sum(1 / np.log2(i + 2) for i in range(10) if i >= first)
        ideal = sum(1 / np.log2(i + 2) for i in range(10))
        assert dev.score(vectors, rank=False)["ndcg@10"] == pytest.approx(100 * hits / ideal, abs=1e-9)


def test_fewer_documents_than_ranks_a_perfect_order_and_prompts() -> None:
    data = Collection("own", "x", "dev", {"a": "one", "b": "two"}, {"q": "one"}, {"q": {"b": 2, "a": 1}}, 0)
    assert DevRetrieval(data).sentences == ["one", "two"]  # a question may be a document's text
    dev = DevRetrieval(data, "query: ", "passage: ")
    assert dev.sentences == ["passage: one", "passage: two", "query: one"]
    vectors = torch.tensor([[1.0, 0.2], [1.0, 0.0], [1.0, 0.0]])
    assert dev.score(vectors)["ndcg@10"] == pytest.approx(100)
    assert dev.score(vectors[[1, 0, 2]])["ndcg@10"] < 90
    torch.testing.assert_close(dev.pair_cosines(vectors)[0], torch.tensor(1.0))
    with pytest.raises(ValueError, match="for 3 texts"):
        dev.score(vectors[:2])
