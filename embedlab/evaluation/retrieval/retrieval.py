"""Retrieval on BEIR-layout collections: exact search, then nDCG@10, MRR@10, recall@100 and MAP by
ir-measures.

The corpus is encoded and searched a block at a time; neither its vectors nor the score matrix exist as a
whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor

from embedlab.encoders.codes import Codes, Store, calibrate, check_store
from embedlab.errors import UserError
from embedlab.evaluation.core.nearest import BACKENDS, RESCORE, Backend, CodesTopK, TopK, unit
from embedlab.evaluation.core.settings import chosen, folder_of, names, require, scoring_device, whole
from embedlab.evaluation.core.suite import Scored, Settings, Suite
from embedlab.evaluation.core.vectors import Encoder, Prompted, embed
from embedlab.evaluation.retrieval.beir import Collection, is_collection, load_collection

SIMILARITIES = ("cosine", "dot")
_BLOCK = 16384  # documents encoded and searched at once
_SIDES: dict[Literal["query", "document"], str] = {"query": "query", "document": "corpus"}
"""Roles of texts, and what the settings call them."""
Run = dict[str, dict[str, float]]
"""query id -> document id -> score."""


class Retrieval(Suite):
    """Retrieval on collections in BEIR's layout.

    Settings: data_dir (a BEIR folder, or a folder of such folders), tasks (names of those folders; default
    all), split (test), similarity (cosine or dot), depth (documents a query, 1000: MAP is over these), index
    (torch or faiss: both exact), query_prompt and corpus_prompt (before each text; default: the encoder's own
    prompts), codes
    (`load_collection`), skip_same_id (drop the document that has the query's own id, as BEIR does for ArguAna
    and Quora), store (how documents are kept: float32, or codes that float queries search, `embedlab.encoders.codes`;
    8-bit ranges are those of the first 16,384 documents), rescore (candidates of a bit a feature for each result, 4),
    device.

    Scores x100: "scifact/ndcg@10", "scifact/mrr@10", "scifact/recall@100", "scifact/map"; with several
    collections their means "retrieval/ndcg@10", ... Queries without a relevant document are not asked.
    """

    name = "retrieval"
    folders = ("retrieval",)
    hub = False
    keys = (
        "tasks",
        "split",
        "similarity",
        "depth",
        "index",
        "query_prompt",
        "corpus_prompt",
        "codes",
        "skip_same_id",
        "store",
        "rescore",
    )
    packages: ClassVar = {"ir_measures": "ir-measures"}

    def load(self, settings: Settings) -> list[Collection]:
        """The collections."""
        how = _how(settings)
        split = settings.get("split") or "test"
        return [load_collection(folder, split, how["codes"]) for folder in _folders(settings)]

    def score(self, encoder: Encoder, data: list[Collection], settings: Settings) -> Scored:
        """nDCG, MRR, recall and MAP of each collection."""
        require("ir_measures", "ir-measures")
        sides = {role: Prompted(encoder, role, settings.get(f"{key}_prompt")) for role, key in _SIDES.items()}
        how = _how(settings) | {"prompts": {_SIDES[role]: side.text for role, side in sides.items()}}
        scores: dict[str, float] = {}
        for collection in data:
            found = search(
                sides["query"], collection, how["depth"], documents_by=sides["document"],
                similarity=how["similarity"], index=how["index"], skip_same_id=how["skip_same_id"],
                device=settings.get("device"), store=how.get("store"), rescore=how.get("rescore"),
            )  # fmt: skip
            measured = measure(found, collection.qrels)
            scores |= {f"{collection.name}/{name}": value for name, value in measured.items()}
        for name in _MEASURES if len(data) > 1 else ():
            scores[f"retrieval/{name}"] = float(np.mean([scores[f"{c.name}/{name}"] for c in data]))
        return self.result(
            encoder,
            scores,
            name="beir",
            aggregation="mean over queries; mean of collections",
            sentences=[how["prompts"]["corpus"] + text for c in data for text in c.documents.values()],
            data={
                c.name: {
                    "source": c.source,
                    "split": c.split,
                    "documents": len(c.documents),
                    "queries": len(c.queries),
                }
                for c in data
            },
            warnings=[
                f"{c.name}: {c.dangling} judgements name a query or document that is not there and were ignored"
                for c in data
                if c.dangling
            ],
            **how,
            ir_measures=metadata.version("ir-measures"),
        )


def _how(settings: Settings) -> dict[str, Any]:
    """What the collections are searched with, as the protocol block says it. UserError for a wrong value."""
    similarity, index = settings.get("similarity") or "cosine", settings.get("index") or "torch"
    if similarity not in SIMILARITIES:
        raise UserError("no such similarity", key="similarity", value=similarity, fix="choose cosine or dot")
    if index not in BACKENDS:
        raise UserError("no such index", key="index", value=index, fix="choose torch or faiss")
    stored: dict[str, Any] = {}
    if (store := settings.get("store") or "float32") != "float32":
        check_store(store)
        if index != "torch":
            raise UserError("codes are searched without faiss", key="store", value=store, fix="index=torch")
        stored = {"store": store, "rescore": whole(settings, "rescore", RESCORE)}
    return stored | {
        "similarity": similarity,
        "depth": whole(settings, "depth", 1000),
        "index": index,
        "skip_same_id": bool(settings.get("skip_same_id")),
        "codes": settings.get("codes") or "binary",
    }


def search(
    encoder: Encoder,
    collection: Collection,
    depth: int = 1000,
    *,
    documents_by: Encoder | None = None,
    similarity: str = "cosine",
    index: Backend = "torch",
    skip_same_id: bool = False,
    device: str | None = None,
    store: Store | None = None,
    rescore: int | None = None,
) -> Run:
    """The `depth` best documents of each query with their scores; `documents_by` encodes the documents.

    Exact, but for a `store`, whose codes stand for the documents.
    """
    place = scoring_device(device)
    shape = unit if similarity == "cosine" else lambda vectors: vectors
    queries = shape(embed(encoder, list(collection.queries.values())).to(place))
    # One more where the query's own document may have to go.
    k = depth + skip_same_id
    documents = list(collection.documents.values())
    blocks = (
        shape(embed(documents_by or encoder, documents[first : first + _BLOCK]).to(place))
        for first in range(0, len(documents), _BLOCK)
    )
    if store is None:
        top = TopK(queries, k, index)
        for block in blocks:
            top.add(block)
        best = top.scores, top.rows
    else:
        best = _by_codes(queries, blocks, k, store, rescore or RESCORE)
    names = list(collection.documents)
    found: Run = {}
    for query, scores, rows in zip(collection.queries, *(x.tolist() for x in best), strict=True):
        ranked = [(names[row], score) for row, score in zip(rows, scores, strict=True)]
        if skip_same_id:
            ranked = [pair for pair in ranked if pair[0] != query]
        found[query] = dict(ranked[:depth])
    return found


def _by_codes(
    queries: Tensor, blocks: Iterator[Tensor], k: int, store: Store, rescore: int
) -> tuple[Tensor, Tensor]:
    """Scores and rows of the best documents, which are kept as codes."""
    top: CodesTopK | None = None
    for block in blocks:
        vectors = block.cpu().numpy()
        if top is None:
            ranges = calibrate([vectors]) if store in ("int8", "uint8") else None
            top = CodesTopK(queries, Codes(store, vectors.shape[1], ranges), k, rescore)
        top.add(top.codes.encode(vectors))
    assert top is not None  # a collection has documents
    return top.result()


_MEASURES = {"ndcg@10": "nDCG@10", "mrr@10": "RR@10", "recall@100": "R@100", "map": "AP"}


def measure(found: Run, qrels: Mapping[str, Mapping[str, int]]) -> dict[str, float]:
    """nDCG@10 (gains linear, as trec_eval), MRR@10, recall@100 and MAP, x100, means over the queries of
    `qrels`.

    Raises UserError when ir-measures is not installed.
    """
    require("ir_measures", "ir-measures")
    import ir_measures

    measures = {name: ir_measures.parse_measure(text) for name, text in _MEASURES.items()}
    values = ir_measures.calc_aggregate(measures.values(), qrels, found)
    return {name: 100 * float(values[measure]) for name, measure in measures.items()}


def ndcg_by_query(found: Run, qrels: Mapping[str, Mapping[str, int]]) -> dict[str, float]:
    """nDCG@10 x100 of each query that has a relevant document; one that nothing was found for has 0.

    Raises UserError when ir-measures is not installed.
    """
    require("ir_measures", "ir-measures")
    import ir_measures

    relevant = {query: gains for query, gains in qrels.items() if any(gain > 0 for gain in gains.values())}
    values = ir_measures.iter_calc([ir_measures.parse_measure(_MEASURES["ndcg@10"])], relevant, found)
    return dict.fromkeys(relevant, 0.0) | {value.query_id: 100 * float(value.value) for value in values}


def _folders(settings: Settings) -> list[Path]:
    folder = folder_of(settings, "retrieval")
    if folder is None:
        raise UserError(
            "retrieval reads local collections",
            key="data_dir",
            fix="data_dir=FOLDER in BEIR's layout (corpus.jsonl, queries.jsonl, qrels/test.tsv), or suite=mteb",
        )
    inside = {path.name: path for path in sorted(folder.iterdir()) if path.is_dir() and is_collection(path)}
    if is_collection(folder):
        inside = {folder.resolve().name: folder}
    if not inside:
        raise UserError("holds no corpus.jsonl", file=folder, key="data_dir", fix="give a BEIR folder")
    return [inside[name] for name in chosen(names(settings, "tasks"), list(inside), "tasks")]
