"""What a store of vectors keeps of an encoder's retrieval, its size, and the time of a query.

    python -m benchmarks.stores CKPT FOLDER [--dims 256,64] [--rows 200000] [--device cpu] [--json OUT] [--markdown]

FOLDER is a collection in BEIR's layout, encoded once. Every width is cut, then normalised; 8-bit ranges are those of
the corpus. Time is the median of single queries over so many random rows on the CPU, not over the collection.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import normalize

import embedlab
from embedlab.encoders.codes import STORES, Codes, Store, calibrate
from embedlab.evaluation.core.nearest import CodesTopK
from embedlab.evaluation.core.vectors import Prompted, Vectors
from embedlab.evaluation.retrieval.beir import Collection, load_collection
from embedlab.evaluation.retrieval.retrieval import measure, search
from embedlab.export.latency import hardware

Row = dict[str, Any]
_QUERIES = 30
_STEPS = 1 << 16


class Known:
    """An encoder whose vectors are there already, cut to so many features."""

    def __init__(self, vectors: Vectors, dim: int) -> None:
        self.vectors, self.dim = vectors, dim

    def encode(self, sentences: list[str]) -> Any:
        return self.vectors.take(sentences)[:, : self.dim]


def measured(
    queries: Vectors, documents: Vectors, collection: Collection, dim: int, store: Store, rows: int
) -> Row:
    """A row of the table."""
    found = search(
        Known(queries, dim), collection, 100, documents_by=Known(documents, dim),
        store=None if store == "float32" else store,
    )  # fmt: skip
    codes = Codes(store, dim, np.zeros((2, dim), np.float32))  # for its size alone
    return {
        "dim": dim, "store": store, "bytes": codes.width * codes.dtype.itemsize,
        **{name: round(value, 2) for name, value in measure(found, collection.qrels).items()},
        "ms": round(1e3 * seconds(store, dim, rows), 2),
    }  # fmt: skip


def seconds(store: Store, dim: int, rows: int) -> float:
    """Median of a query over random rows."""
    draw = torch.Generator().manual_seed(0)
    vectors = normalize(torch.randn(rows, dim, generator=draw), dim=1).numpy()
    codes = Codes(store, dim, calibrate([vectors]))
    held, times = codes.encode(vectors), []
    for query in normalize(torch.randn(_QUERIES, dim, generator=draw), dim=1):
        start = time.perf_counter()
        top = CodesTopK(query[None], codes, 10)
        for at in range(0, rows, _STEPS):
            top.add(held[at : at + _STEPS])
        top.result()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ckpt")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--split", default="test")
    parser.add_argument("--dims", default="")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--device", default=None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    encoder = embedlab.load(options.ckpt)
    if options.device:
        encoder.to(options.device)
    collection = load_collection(options.folder, options.split)
    queries = Vectors(Prompted(encoder, "query"), collection.queries.values())
    documents = Vectors(Prompted(encoder, "document"), collection.documents.values())
    dims = [int(dim) for dim in options.dims.split(",") if dim] or [encoder.dim]
    rows = [
        measured(queries, documents, collection, d, store, options.rows) for d in dims for store in STORES
    ]
    for row in rows:
        print(row)
    if options.json:
        content = {
            "ckpt": options.ckpt, "fingerprint": encoder.fingerprint(), "collection": collection.name,
            "documents": len(collection.documents), "queries": len(collection.queries), "timed_rows": options.rows,
            "hardware": hardware(), "threads": torch.get_num_threads(), "rows": rows,
        }  # fmt: skip
        options.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if options.markdown:
        print(markdown(rows))


def markdown(rows: list[Row]) -> str:
    """The table of docs; what is kept is a share of the first row's score."""
    lines = ["| width | store | bytes | nDCG@10 | kept | ms a query |", "|--:|---|--:|--:|--:|--:|"]
    for row in rows:
        kept = row["ndcg@10"] / rows[0]["ndcg@10"]
        cells = (row["dim"], row["store"], row["bytes"], f"{row['ndcg@10']:.2f}", f"{kept:.1%}", row["ms"])
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
