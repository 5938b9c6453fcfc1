"""What was mined as a table that `data=triplets` or `data=scored` reads, and its statistics."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from embedlab.config.mine import FILTERS, Format
from embedlab.console import table
from embedlab.corpus.mine import Block, Candidates, Miner, Pairs
from embedlab.errors import UserError
from embedlab.files import whole_file

if TYPE_CHECKING:
    from rich.table import Table

_AT_ONCE = 4096  # rows of a group of a Parquet file
_MUCH = 0.5
"""Share of the candidates from which on a margin's work is worth a line: it is 8 to 84 % by model
(sentence-transformers' issue 3279)."""
_WORDS = {"positive": "positives", "negative": "negatives", "difference": "positive less negative"}


class Statistics:
    """Counts and scores of what was mined, block by block; 4 bytes a score are held."""

    def __init__(self, negatives: int) -> None:
        self.negatives = negatives
        self.queries = self.short = self.candidates = self.rows = 0
        self.removed = np.zeros(len(FILTERS), dtype=np.int64)
        self._scores: dict[str, list[NDArray[np.float32]]] = {name: [] for name in _WORDS}

    def add(self, block: Block, positives: NDArray[np.int64]) -> None:
        """A block, whose queries have so many positives each."""
        self.queries += len(block.counts)
        self.short += int((block.counts < self.negatives).sum())
        self.candidates += int(block.seen)
        self.removed += block.removed
        self._scores["positive"].append(block.positives)
        self._scores["negative"].append(block.scores)
        negatives = _split(block.scores, block.counts)
        for mine, own in zip(negatives, _split(block.positives, positives), strict=True):
            self._scores["difference"].append((own[:, None] - mine).ravel())

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "queries": self.queries, "short": self.short, "candidates": self.candidates, "rows": self.rows,
            "removed": {name: int(n) for name, n in zip(FILTERS, self.removed, strict=True)},
        } | {name: _described(np.concatenate(scores)) for name, scores in self._scores.items()}  # fmt: skip

    def table(self) -> Table:
        """Scores of positives, of negatives and their differences."""
        found = self.to_dict()
        rows = [
            (words, *(f"{v:,}" if isinstance(v, int) else f"{v:.4f}" for v in found[name].values()))
            for name, words in _WORDS.items()
        ]
        return table(("", "count", "mean", "sd", "min", "q1", "median", "q3", "max"), rows)

    def lines(self) -> list[str]:
        """What was left out."""
        same, *filtered = self.to_dict()["removed"].items()
        told = "".join(f", {name} left out {n:,}" for name, n in filtered if n)
        lines = [
            f"{same[1]:,} nearest texts were the query or a positive of it",
            f"{self.candidates:,} candidates within the ranks{told}",
        ]
        if self.short:
            share = self.short / self.queries
            few = f"have fewer than {self.negatives} negatives"
            lines.append(f"{self.short:,} of {self.queries:,} queries ({share:.0%}) {few}")
        return lines

    def warnings(self) -> list[str]:
        """What may surprise."""
        margins = int(self.removed[1] + self.removed[2])
        if margins <= _MUCH * self.candidates:
            return []
        share = margins / self.candidates
        return [
            f"margins left out {share:.0%} of the candidates: a smaller one, or max_score, suits this encoder"
        ]


def _split(values: NDArray[np.float32], counts: NDArray[np.int64]) -> list[NDArray[np.float32]]:
    return np.split(values, np.cumsum(counts)[:-1])


def _described(scores: NDArray[np.float32]) -> dict[str, int | float]:
    if not len(scores):
        return {"count": 0}
    values = scores.astype(np.float64)
    quartiles = dict(
        zip(("min", "q1", "median", "q3", "max"), np.quantile(values, [0, 0.25, 0.5, 0.75, 1]), strict=True)
    )
    summary = {"mean": values.mean(), "sd": values.std()} | quartiles
    return {"count": len(values)} | {name: round(float(value), 6) for name, value in summary.items()}


def write_mined(
    path: Path, miner: Miner, kind: Format, scores: bool, on_block: Any = lambda done: None,
    on_end: Callable[[Statistics], None] = lambda found: None,
) -> Statistics:  # fmt: skip
    """Mine and write the table, whole or not at all; texts are read as they are written.

    Args:
        path: of a file with one of `SUFFIXES`.
        miner: of the blocks.
        kind: of the rows. ``triplets``: anchor, positive, negative. ``tuples``: negative_1 to negative_n; a query with
            fewer has no row. ``lists``: negatives. ``scored``: sentence1, sentence2 and score.
        scores: write the encoder's (or the teacher's) scores: score_0 of the positive, score_1 of the first negative,
            or a list; with ``scored`` in place of 1 and 0.
        on_block: called with the queries that are done.
        on_end: called with the numbers, before the table takes its name.
    """
    statistics = Statistics(miner.settings.negatives)

    def rows() -> Iterator[Mapping[str, Any]]:
        for queries, block in miner.blocks(on_block):
            bounds = miner.pairs.bounds[queries.start : queries.stop + 1]
            statistics.add(block, np.diff(bounds))
            for row in _rows(
                queries, block, miner.pairs, miner.candidates, kind, scores, statistics.negatives
            ):
                statistics.rows += 1
                yield row

    with whole_file(path) as new:
        _WRITERS[path.suffix.lower()](new, rows())
        if not statistics.rows:
            fix = "a larger corpus, deeper ranks, a smaller margin"
            raise UserError(f"no row is left of {statistics.queries:,} queries", file=path, fix=fix)
        on_end(statistics)
    return statistics


def _rows(
    queries: range, block: Block, pairs: Pairs, candidates: Candidates, kind: Format, scores: bool, n: int
) -> Iterator[Mapping[str, Any]]:
    at = np.concatenate([[0], np.cumsum(block.counts)])
    first = pairs.bounds[queries.start]
    for i, query in enumerate(queries):
        mine = slice(at[i], at[i + 1])
        negatives = candidates.texts(block.rows[mine].tolist())
        scored = [round(float(s), 6) for s in block.scores[mine]]
        for place in range(pairs.bounds[query], pairs.bounds[query + 1]):
            own = round(float(block.positives[place - first]), 6)
            texts = (pairs.queries[query], pairs.corpus[int(pairs.rows[place])])
            yield from _shaped(kind, n, texts, negatives, [own, *scored] if scores else None)


def _shaped(
    kind: Format, n: int, texts: tuple[str, str], negatives: list[str], scores: list[float] | None
) -> Iterator[Mapping[str, Any]]:
    """The rows of one query with one positive and its negatives."""
    pair = dict(zip(("anchor", "positive"), texts, strict=True))
    if kind == "triplets":
        for i, negative in enumerate(negatives, 1):
            yield (
                pair
                | {"negative": negative}
                | ({"score_0": scores[0], "score_1": scores[i]} if scores else {})
            )
    elif kind == "tuples" and len(negatives) == n:
        each = {f"negative_{i}": negative for i, negative in enumerate(negatives, 1)}
        yield pair | each | ({f"score_{i}": score for i, score in enumerate(scores)} if scores else {})
    elif kind == "lists" and negatives:
        yield pair | {"negatives": negatives} | ({"scores": scores} if scores else {})
    elif kind == "scored":
        given = scores or [1.0, *[0.0] * len(negatives)]
        for second, score in zip((texts[1], *negatives), given, strict=True):
            yield {"sentence1": texts[0], "sentence2": second, "score": score}


def _write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _write_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = None
        for row in rows:
            if writer is None:
                # All texts in quotes: of a bare \r beside another line end, csv takes none.
                writer = csv.DictWriter(file, list(row), lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
                writer.writeheader()
            writer.writerow(row)


def _write_parquet(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with _parquet(path, pq) as write:
        some: list[Mapping[str, Any]] = []
        for row in rows:
            some.append(row)
            if len(some) == _AT_ONCE:
                write(pa.Table.from_pylist(some))
                some = []
        if some:
            write(pa.Table.from_pylist(some))


@contextmanager
def _parquet(path: Path, pq: Any) -> Iterator[Any]:
    writer: Any = None

    def write(table: Any) -> None:
        nonlocal writer
        if writer is None:
            writer = pq.ParquetWriter(path, table.schema)
        writer.write_table(table)

    try:
        yield write
    finally:
        if writer is not None:
            writer.close()


_WRITERS = {".jsonl": _write_jsonl, ".csv": _write_csv, ".parquet": _write_parquet}
