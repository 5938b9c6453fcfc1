"""Exact search against a full sort; the metrics against their definitions; BEIR folders good and bad."""

from __future__ import annotations

import gzip
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import embedlab
from embedlab.cli.encoders import Configured
from embedlab.encoders.codes import STORES, Codes, Store, calibrate
from embedlab.encoders.usage import Usage
from embedlab.errors import UserError
from embedlab.evaluation.core import nearest
from embedlab.evaluation.core.nearest import TopK, unit
from embedlab.evaluation.core.protocol import check
from embedlab.evaluation.core.suite import suite
from embedlab.evaluation.core.vectors import Prompted
from embedlab.evaluation.retrieval import retrieval
from embedlab.evaluation.retrieval.beir import load_collection
from embedlab.evaluation.retrieval.retrieval import Retrieval, measure, search
from tests.evaluation.helpers import HashedWords
from tests.evaluation.real import needs_data

run = Retrieval().run
DOCUMENTS = {
    "d1": ("Wings", "lift of a wing in slow air"),
    "d2": ("", "heat in a thin plate"),
    "d3": ("Plates", "a plate bends under load"),
    "d4": ("Soup", "boil the onion slowly"),
}
QUERIES = {"q1": "lift of a wing", "q2": "bends under load", "q3": "never judged"}
QRELS = [("q1", "d1", 2), ("q1", "d3", 1), ("q2", "d3", 1), ("q2", "d2", 0)]


def write_collection(
    folder: Path, column: str = "score", qrels: list[Any] = QRELS, zipped: bool = False
) -> Path:
    folder.mkdir(parents=True)
    opened: Callable[..., Any] = gzip.open if zipped else open
    end = ".gz" if zipped else ""
    with opened(folder / f"corpus.jsonl{end}", "wt", encoding="utf-8") as stream:
        for name, (title, text) in DOCUMENTS.items():
            stream.write(json.dumps({"_id": name, "title": title, "text": text}) + "\n")
    with opened(folder / f"queries.jsonl{end}", "wt", encoding="utf-8") as stream:
        for name, text in QUERIES.items():
            stream.write(json.dumps({"_id": name, "text": text, "metadata": {}}) + "\n")
    with opened(folder / f"qrels_test.tsv{end}", "wt", encoding="utf-8") as stream:
        stream.write(f"query-id\tcorpus-id\t{column}\n")
        stream.writelines("\t".join(map(str, row)) + "\n" for row in qrels)
    return folder


@pytest.mark.parametrize("k", [1, 7, 200])
@pytest.mark.parametrize("blocks", [[100], [1, 60, 39]])
@pytest.mark.parametrize("backend", ["torch", "faiss"])
def test_search_is_a_full_sort(
    monkeypatch: pytest.MonkeyPatch, k: int, blocks: list[int], backend: Any
) -> None:
    if backend == "faiss":
        pytest.importorskip("faiss", reason="faiss-cpu is not installed")
    monkeypatch.setattr(nearest, "_SCORES_AT_ONCE", 5 * 30)  # blocks of 30 documents
    generator = torch.Generator().manual_seed(0)
    queries, documents = torch.randn(5, 8, generator=generator), torch.randn(100, 8, generator=generator)
    top = TopK(queries, k, backend)
    for block in documents.split(blocks):
        top.add(block)
    scores, rows = (queries @ documents.T).sort(dim=1, descending=True)
    torch.testing.assert_close(top.rows, rows[:, :k])
    torch.testing.assert_close(top.scores, scores[:, :k])


def test_equal_documents_keep_their_order() -> None:
    top = TopK(torch.ones(1, 2), 3)
    for _ in range(4):
        top.add(torch.ones(2, 2))
    assert top.rows.tolist() == [[0, 1, 2]]


def test_a_zero_vector_has_cosine_zero() -> None:
    assert unit(torch.zeros(1, 3)).tolist() == [[0.0, 0.0, 0.0]]


def definition(ranked: list[str], gains: dict[str, int]) -> dict[str, float]:
    """The four metrics of one query, from their formulas."""
    ideal = sorted(gains.values(), reverse=True)
    discount = [1 / math.log2(i + 2) for i in range(10)]
    dcg = sum(gains.get(d, 0) * w for d, w in zip(ranked, discount, strict=False))
    idcg = sum(g * w for g, w in zip(ideal, discount, strict=False))
    relevant = {d for d, g in gains.items() if g > 0}
    hits = [d in relevant for d in ranked]
    first = next((i for i, hit in enumerate(hits[:10]) if hit), None)
    precision = [sum(hits[: i + 1]) / (i + 1) for i, hit in enumerate(hits) if hit]
    return {
        "ndcg@10": dcg / idcg,
        "mrr@10": 0.0 if first is None else 1 / (first + 1),
        "recall@100": sum(hits[:100]) / len(relevant),
        "map": sum(precision) / len(relevant),
    }


def test_metrics_are_their_definitions() -> None:
    rng = np.random.default_rng(0)
    qrels, found, expected = {}, {}, []
    for q in range(20):
        documents = [f"d{i}" for i in rng.permutation(150)]
        qrels[f"q{q}"] = {d: int(rng.integers(1, 4)) for d in documents[: rng.integers(1, 12)]}
        # The last query has no hit at all; every other one finds some.
        ranked = [f"x{i}" for i in range(30)] if q == 19 else [f"d{i}" for i in rng.permutation(150)[:130]]
        found[f"q{q}"] = {d: 1.0 - i / 1000 for i, d in enumerate(ranked)}
        expected.append(definition(ranked, qrels[f"q{q}"]))
    values = measure(found, qrels)
    for name in ("ndcg@10", "mrr@10", "recall@100", "map"):
        assert values[name] == pytest.approx(100 * np.mean([e[name] for e in expected]), abs=1e-6)


def test_a_query_that_finds_nothing_counts_as_zero() -> None:
    values = measure({"a": {"d": 1.0}}, {"a": {"d": 1}, "b": {"d": 1}})
    assert set(values.values()) == {50.0}


@pytest.mark.parametrize("zipped", [False, True])
def test_folder(tmp_path: Path, zipped: bool) -> None:
    collection = load_collection(write_collection(tmp_path / "mini", zipped=zipped))
    assert collection.documents["d1"] == "Wings lift of a wing in slow air"
    assert collection.documents["d2"] == "heat in a thin plate", "no title, no space"
    assert list(collection.queries) == ["q1", "q2"], "q3 has no relevant document"
    assert collection.qrels == {"q1": {"d1": 2, "d3": 1}, "q2": {"d3": 1}}


@pytest.mark.parametrize(
    ("codes", "expected"),
    [("binary", {"q1": {"d1": 1, "d3": 1}}), ("graded", {"q1": {"d1": 4, "d3": 1}})],
)
def test_cranfield_codes(tmp_path: Path, codes: str, expected: dict[str, Any]) -> None:
    rows = [("q1", "d1", 1), ("q1", "d3", 4), ("q1", "d2", -1)]
    assert load_collection(write_collection(tmp_path / "c", "code", rows), codes=codes).qrels == expected


def test_suite(tmp_path: Path) -> None:
    write_collection(tmp_path / "one")
    write_collection(tmp_path / "two", zipped=True)
    (tmp_path / "not_a_collection").mkdir()
    scores, block = run(HashedWords(256), {"data_dir": tmp_path})
    # q1 ranks d1 (gain 2) first, q2 its only document: MRR and recall are full, nDCG too if d3 is next for
    # q1.
    assert scores["one/mrr@10"] == scores["two/mrr@10"] == scores["retrieval/mrr@10"] == 100
    assert scores["one/recall@100"] == 100
    check(block)
    json.dumps(block)
    assert block["data"]["one"]["documents"] == 4
    only, _ = run(HashedWords(256), {"data_dir": tmp_path / "one"})
    assert only["one/map"] == scores["one/map"]
    assert "retrieval/map" not in only
    assert isinstance(suite("retrieval"), Retrieval)


def test_prompts_and_dot_products_reach_the_encoder(tmp_path: Path) -> None:
    encoder = HashedWords()
    settings = {"query_prompt": "query: ", "corpus_prompt": "passage: ", "similarity": "dot"}
    _, block = run(encoder, {"data_dir": write_collection(tmp_path / "c"), **settings})
    queries, documents = encoder.calls
    assert all(text.startswith("query: ") for text in queries)
    assert all(text.startswith("passage: ") for text in documents)
    assert block["prompts"] == {"query": "query: ", "corpus": "passage: "}
    collection = load_collection(tmp_path / "c")
    found = search(HashedWords(), collection, similarity="dot")
    vectors = HashedWords().encode([QUERIES["q1"], collection.documents["d1"]])
    assert found["q1"]["d1"] == pytest.approx(float(vectors[0] @ vectors[1]), rel=1e-5)


def test_own_document_can_be_skipped(tmp_path: Path) -> None:
    folder = write_collection(tmp_path / "c")
    with (folder / "queries.jsonl").open("a", encoding="utf-8") as stream:
        stream.write(json.dumps({"_id": "d1", "text": "lift of a wing in slow air"}) + "\n")
    with (folder / "qrels_test.tsv").open("a", encoding="utf-8") as stream:
        stream.write("d1\td3\t1\n")
    collection = load_collection(folder)
    kept = search(HashedWords(), collection, depth=2)
    skipped = search(HashedWords(), collection, depth=2, skip_same_id=True)
    assert "d1" in kept["d1"]
    assert "d1" not in skipped["d1"]
    assert len(skipped["d1"]) == 2


def corrupt(path: Path, content: str | bytes) -> None:
    path.write_bytes(content.encode() if isinstance(content, str) else content)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "corpus.jsonl",
            '{"_id": "d1", "text": "a"}\n{"_id": "d2"}\n',
            r"corpus\.jsonl:2: _id, title and text must be strings",
        ),
        ("corpus.jsonl", '{"_id": "d1", "text": "a"}\n\nnope\n', r"corpus\.jsonl:3: not JSON"),
        (
            "corpus.jsonl",
            '{"_id": 3, "text": "a"}\n',
            r"corpus\.jsonl:1: _id, title and text must be strings",
        ),
        ("corpus.jsonl", '{"_id": "d1", "text": "a"}\n' * 2, r"corpus\.jsonl:2: this _id came before"),
        ("corpus.jsonl", "\n", r"corpus\.jsonl: has no rows"),
        ("corpus.jsonl", b'{"_id": "d1", "text": "\xe9"}\n', r"corpus\.jsonl:1: not UTF-8"),
        (
            "qrels_test.tsv",
            "query-id\tcorpus-id\tscore\nq1\td1\tyes\n",
            r"qrels_test\.tsv:2: is not a whole number",
        ),
        ("qrels_test.tsv", "query-id\tcorpus-id\tscore\nq9\td1\t1\n", r"qrels_test\.tsv: judges no document"),
        (
            "qrels_test.tsv",
            "query-id\tcorpus-id\nq\td\n",
            r"qrels_test\.tsv: has neither a column score nor code",
        ),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    folder = write_collection(tmp_path / "c")
    corrupt(folder / name, content)
    with pytest.raises(UserError, match=message):
        load_collection(folder)


def test_broken_gzip(tmp_path: Path) -> None:
    folder = write_collection(tmp_path / "c", zipped=True)
    whole = (folder / "corpus.jsonl.gz").read_bytes()
    (folder / "corpus.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"corpus\.jsonl\.gz: the \.gz file is truncated or damaged"):
        load_collection(folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"similarity": "l2"}, "similarity=l2"),
        ({"index": "hnsw"}, "index=hnsw"),
        ({"split": "dev"}, "split=dev"),
        ({"tasks": ["other"]}, "tasks=other"),
        ({"depth": -1}, "depth=-1"),
    ],
)
def test_bad_settings(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    write_collection(tmp_path / "c")
    with pytest.raises(UserError, match=message):
        run(HashedWords(), {"data_dir": tmp_path, **settings})


def test_no_collection(tmp_path: Path) -> None:
    for data_dir, message in (
        (None, "data_dir"),
        (tmp_path / "x", "no such folder"),
        (tmp_path, "no corpus.jsonl"),
    ):
        with pytest.raises(UserError, match=message):
            run(HashedWords(), {"data_dir": data_dir})


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(UserError, match="pip install faiss-cpu"):
        TopK(torch.ones(1, 2), 1, "faiss")
    monkeypatch.setitem(sys.modules, "ir_measures", None)
    with pytest.raises(UserError, match="ir-measures is missing"):
        measure({"a": {"d": 1.0}}, {"a": {"d": 1}})


class TfIdf:
    """Words weighed by scikit-learn's TF-IDF (sublinear, English stop words), fitted on a corpus; dense
    rows.
    """

    def __init__(self, corpus: list[str]) -> None:
        from sklearn.feature_extraction.text import TfidfVectorizer

        self.vectorizer = TfidfVectorizer(stop_words="english", sublinear_tf=True).fit(corpus)

    def encode(self, sentences: list[str]) -> np.ndarray:
        return self.vectorizer.transform(sentences).toarray().astype(np.float32)


@pytest.mark.parametrize(
    ("name", "ndcg"), [pytest.param("scifact", 62.8, marks=pytest.mark.slow), ("cranfield", 36.4)]
)
def test_tf_idf_reaches_the_figure_of_the_data_readme(name: str, ndcg: float) -> None:
    """nDCG@10 .628 (SciFact test) and .364 (Cranfield, codes 1-4 relevant)."""
    folder = needs_data("retrieval") / name
    encoder = TfIdf(list(load_collection(folder).documents.values()))
    scores, _ = run(encoder, {"data_dir": folder, "depth": 100})
    assert scores[f"{name}/ndcg@10"] == pytest.approx(ndcg, abs=0.05)


def test_an_encoders_own_prompts(tmp_path: Path, tiny: Callable[..., Path]) -> None:
    """The roles' prompts by default, others where the settings give them, never two."""
    encoder = embedlab.load(tiny("bert"))
    plain = {role: Prompted(encoder, role) for role in ("query", "document")}
    encoder.usage = Usage({"query": "ask: ", "passage": "text: ", "other": "no: "}, "other")
    for role, own in (("query", "ask: "), ("document", "text: ")):
        for given, text in ((None, own), ("", ""), ("new: ", "new: ")):
            prompted = Prompted(encoder, role, given)
            assert prompted.text == text
            expected = encoder.encode([text + "a cat"], prompt="")
            np.testing.assert_array_equal(prompted.encode(["a cat"]), expected)
            seen = Prompted(
                Configured.of(encoder, {"device": "cpu", "dtype": None, "batch_size": None}), role, given
            )
            np.testing.assert_array_equal(seen.encode(["a cat"]), expected)
    assert plain["query"].text == ""
    assert Prompted(HashedWords(), "query", "ask: ").text == "ask: "


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1), (1, 0), (0, 1), (1, -1)])
@pytest.mark.parametrize("between", [0, 2])
def test_a_pair_is_judged_once_or_alike(first: int, second: int, between: int, tmp_path: Path) -> None:
    others = [("q1", "d2", 1), ("q2", "d1", 1)][:between]
    twice = [("q1", "d1", first), *others, ("q1", "d1", second)]
    with pytest.raises(UserError, match=rf":{3 + between}: q1 and d1 are judged twice, and not alike"):
        load_collection(write_collection(tmp_path / "odd", "score", twice))
    alike = [("q1", "d3", 1), ("q1", "d1", first), *others, ("q1", "d1", first)]
    found = load_collection(write_collection(tmp_path / "alike", "score", alike)).qrels["q1"]
    assert found.get("d1", 0) == first


@pytest.mark.parametrize("store", STORES[1:])
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_a_store_ranks_by_what_its_codes_stand_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Store, similarity: str
) -> None:
    monkeypatch.setattr(retrieval, "_BLOCK", 3)
    collection = load_collection(write_collection(tmp_path / "demo"))
    found = search(HashedWords(), collection, 4, similarity=similarity, store=store, rescore=2)
    q, x = (HashedWords().encode(list(t.values())) for t in (collection.queries, collection.documents))
    if similarity == "cosine":
        q, x = (v / np.linalg.norm(v, axis=1, keepdims=True) for v in (q, x))
    codes = Codes(store, 64, calibrate([x[:3]]))  # the ranges are those of the first block
    for query, scores in zip(collection.queries, q @ codes.decode(codes.encode(x)).T, strict=True):
        by_hand = dict(zip(collection.documents, scores.tolist(), strict=True))
        assert found[query] == pytest.approx(by_hand, abs=1e-4)
        assert list(found[query]) == sorted(by_hand, key=lambda name: -by_hand[name])


def test_a_store_is_in_the_protocol(tmp_path: Path) -> None:
    settings = {"data_dir": str(write_collection(tmp_path / "demo"))}
    assert "store" not in run(HashedWords(), settings)[1]
    protocol = run(HashedWords(), settings | {"store": "ubinary", "rescore": 2})[1]
    assert (protocol["store"], protocol["rescore"]) == ("ubinary", 2)
    for bad in ({"store": "int4"}, {"store": "int8", "index": "faiss"}, {"store": "binary", "rescore": 0}):
        with pytest.raises(UserError, match=r"store|rescore"):
            run(HashedWords(), settings | bad)
