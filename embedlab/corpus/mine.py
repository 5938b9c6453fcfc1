"""Hard negatives: for each query the texts of a corpus that an encoder ranks high and that are none of its positives.

Texts, vectors and results lie in a working folder in parts, each whole or absent: memory holds one block of queries
with `K` candidates each (12 bytes a candidate), and a kill costs one part. The order of work:

1. queries with their positives; corpus and positives without repeats (`write_pairs`);
2. their vectors (`embedlab.corpus.texts`);
3. the `K` nearest texts of each query by cosine, block by block (more where step 4 leaves too few of them);
4. less those that are the query or a positive of it but for case, spaces and compatible characters;
5. of these the ranks from `range_min` to below `range_max`;
6. of these what the score filters leave;
7. of these the first, or a sample that depends on the seed and the query's text alone.
"""

from __future__ import annotations

import unicodedata
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray

from embedlab.config.mine import FILTERS, MineSettings
from embedlab.corpus.search import Index
from embedlab.corpus.texts import StoredTexts, UnitVectors, mapped, text_hash, write_texts
from embedlab.errors import UserError
from embedlab.evaluation.core.nearest import TopK
from embedlab.files import whole_file, whole_folder, write_array

_SPARE = 8
"""Candidates beyond the last one needed: scores of a block and of a pair differ in their last digits."""


class Candidates(Protocol):
    """A corpus that is searched."""

    def nearest(self, queries: NDArray[np.float32], k: int) -> NDArray[np.int64]:
        """Rows [q, k] of the texts nearest to unit vectors [q, D]; below 0 where there are fewer."""
        ...

    def take(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Unit vectors [n, D]."""
        ...

    def texts(self, rows: Sequence[int]) -> list[str]: ...


class Pairs(NamedTuple):
    """Queries with their positives: texts, and of query i the positives `rows[bounds[i] : bounds[i + 1]]`."""

    queries: StoredTexts
    corpus: StoredTexts
    """Positives, then what else the corpus has; no text twice."""
    rows: NDArray[np.int64]
    bounds: NDArray[np.int64]

    @property
    def most(self) -> int:
        """Positives of a query at most."""
        return int(np.diff(self.bounds).max())


def write_pairs(
    folder: Path, pairs: Callable[[], Iterable[tuple[str, str]]], corpus: Callable[[], Iterable[str]]
) -> Pairs:
    """The texts of a working folder, written if they are not there.

    Args:
        folder: for them.
        pairs: query and positive, from the start at every call; texts are not held, but for 8 bytes each.
        corpus: further texts, in the same way.

    Raises:
        UserError: no pair.
    """
    if not folder.is_dir():
        with whole_folder(folder) as made:
            _write_pairs(made, pairs, corpus)
    fix = f"remove {folder}: it is made again"
    rows, bounds = (np.array(mapped(folder / f"{name}.npy", fix)) for name in ("rows", "bounds"))
    found = Pairs(StoredTexts(folder / "queries"), StoredTexts(folder / "corpus"), rows, bounds)
    if len(bounds) != len(found.queries) + 1 or bounds[-1] != len(rows) or rows.max() >= len(found.corpus):
        raise UserError("is damaged (its files do not fit)", file=folder, fix=fix)
    return found


def _write_pairs(
    folder: Path, pairs: Callable[[], Iterable[tuple[str, str]]], corpus: Callable[[], Iterable[str]]
) -> None:
    queries, texts = array("Q"), array("Q")
    for query, positive in pairs():
        queries.append(text_hash(query))
        texts.append(text_hash(positive))
    n = len(queries)
    if not n:
        raise UserError("has no pair of a query and a positive", key="input", fix="a file with pairs")
    texts.extend(map(text_hash, corpus()))
    new_query, query_of = _first(queries)
    new_text, row_of = _first(texts)
    write_texts(folder / "queries", (q for (q, _), new in zip(pairs(), new_query, strict=True) if new))

    def every() -> Iterator[str]:
        yield from (positive for _, positive in pairs())
        yield from corpus()

    write_texts(folder / "corpus", (t for t, new in zip(every(), new_text, strict=True) if new))
    both = np.stack([query_of, row_of[:n]], axis=1)
    both = both[np.sort(np.unique(both, axis=0, return_index=True)[1])]  # a pair that repeats is one
    both = both[both[:, 0].argsort(kind="stable")]
    bounds = np.searchsorted(both[:, 0], np.arange(new_query.sum() + 1))
    for name, values in (("rows", both[:, 1]), ("bounds", bounds)):
        write_array(folder / f"{name}.npy", values)


def _first(hashes: array[int]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Which ones are the first of their value, and for each its number among these."""
    values = np.frombuffer(hashes, dtype=np.uint64)
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    new = np.zeros(len(values), dtype=bool)
    new[first] = True
    return new, (np.cumsum(new) - 1)[first][inverse.reshape(-1)]


class Corpus:
    """The texts of `Pairs.corpus` as `Candidates`, searched exactly on a device."""

    def __init__(self, vectors: UnitVectors, device: torch.device) -> None:
        self.vectors, self.device = vectors, device

    def nearest(self, queries: NDArray[np.float32], k: int) -> NDArray[np.int64]:
        top = TopK(torch.from_numpy(queries).to(self.device), k)
        for part in self.vectors.parts():
            top.add(torch.from_numpy(np.array(part)).to(self.device))
        rows: NDArray[np.int64] = top.rows.cpu().numpy()
        return rows

    def take(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        return self.vectors.take(rows)

    def texts(self, rows: Sequence[int]) -> list[str]:
        return [self.vectors.texts[row] for row in rows]


class Indexed:
    """The texts of a search index as `Candidates`; approximate where the index is.

    Raises:
        UserError: it has vectors alone.
    """

    def __init__(self, index: Index) -> None:
        if not index.info.texts:
            raise UserError("has no texts", file=index.folder, key="search", fix="an index of texts")
        self.index = index

    def nearest(self, queries: NDArray[np.float32], k: int) -> NDArray[np.int64]:
        return np.asarray(self.index.nearest(torch.from_numpy(queries), k)[0])

    def take(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        return self.index.stored.take(rows).numpy()

    def texts(self, rows: Sequence[int]) -> list[str]:
        return self.index.texts(rows)


class Judging(Protocol):
    """Whose scores the filters read."""

    def scores(
        self, query: int, own: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Of a query with its positives, rows of `Pairs.corpus`, and with candidates."""
        ...


class Judge(NamedTuple):
    """An encoder's vectors of the queries, the positives and the candidates; scores are cosines."""

    queries: UnitVectors
    positives: UnitVectors
    candidates: Callable[[NDArray[np.int64]], NDArray[np.float32]]

    def scores(
        self, query: int, own: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """As of `Judging`."""
        vector = self.queries.take([query])
        return _cosines(vector, self.positives.take(own)), _cosines(vector, self.candidates(rows))


@dataclass(frozen=True)
class Block:
    """What was mined for the queries of a block.

    Attributes:
        counts: [b], negatives of each query.
        rows: candidates that are negatives, query by query.
        scores: of these, float32.
        positives: scores of the positives, as `Pairs.rows` has them.
        seen: candidates within the ranks.
        removed: [filters], candidates that each of `FILTERS` left out.
    """

    counts: NDArray[np.int64]
    rows: NDArray[np.int64]
    scores: NDArray[np.float32]
    positives: NDArray[np.float32]
    seen: NDArray[np.int64]
    removed: NDArray[np.int64]


class Miner:
    """Mines block by block into a folder.

    Args:
        folder: of the results, one file a block.
        pairs: queries and positives.
        candidates: the corpus that is searched.
        model: whose vectors rank.
        settings: what counts as a hard negative.
        block: queries at a time; of no effect on the result.
        teacher: whose scores the filters read; None: those of `model`.
    """

    def __init__(
        self,
        folder: Path,
        pairs: Pairs,
        candidates: Candidates,
        model: Judge,
        settings: MineSettings,
        block: int = 1024,
        teacher: Judging | None = None,
    ) -> None:
        self.folder, self.pairs, self.candidates = folder, pairs, candidates
        self.model, self.settings, self.size = model, settings, block
        self.judge: Judging = teacher or model

    def blocks(self, on_block: Callable[[int], None] = lambda done: None) -> Iterator[tuple[range, Block]]:
        """Each block of queries with what was mined for it, computed where it is not there yet."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for start in range(0, len(self.pairs.queries), self.size):
            queries = range(start, min(start + self.size, len(self.pairs.queries)))
            file = self.folder / f"{start:09d}.npz"
            if not file.is_file():
                with whole_file(file) as new, new.open("wb") as stream:
                    np.savez(stream, **vars(self._mine(queries)))
            yield queries, _read(file)
            on_block(queries.stop)

    @property
    def _wanted(self) -> int:
        """Candidates of a query that are searched for."""
        return self.settings.last + self.pairs.most + 1 + _SPARE

    def _mine(self, queries: range) -> Block:
        nearest = self.candidates.nearest(self.model.queries.take(queries), self._wanted)
        rows, scores, positives = [], [], []
        removed, seen = np.zeros(len(FILTERS), dtype=np.int64), 0
        for query, row in zip(queries, nearest, strict=True):
            found = self._of_query(query, row, removed)
            rows.append(found.rows)
            scores.append(found.scores)
            positives.append(found.positives)
            seen += found.seen
        counts = np.array([len(some) for some in rows])
        return Block(
            counts, np.concatenate(rows), np.concatenate(scores).astype(np.float32),
            np.concatenate(positives).astype(np.float32), np.array(seen), removed,
        )  # fmt: skip

    def _of_query(self, query: int, rows: NDArray[np.int64], removed: NDArray[np.int64]) -> _Found:
        """The negatives of one query among its nearest rows; `removed` is added to."""
        settings, pairs = self.settings, self.pairs
        own = pairs.rows[pairs.bounds[query] : pairs.bounds[query + 1]]
        same = {folded(pairs.queries[query]), *(folded(pairs.corpus[row]) for row in own.tolist())}
        others, left_out = self._others(query, rows, same)
        wanted = self._wanted
        while len(others) < settings.last and len(others) + left_out == wanted:
            # The corpus has a positive many times but for case and spaces: there is more to find.
            wanted *= 2
            deeper = self.candidates.nearest(self.model.queries.take([query]), wanted)
            others, left_out = self._others(query, deeper[0], same)
        removed[0] += left_out
        rows = others[settings.range_min : settings.last]
        positives, scores = self.judge.scores(query, own, rows)
        kept = np.ones(len(rows), dtype=bool)
        for i, passes in enumerate(self._filters(scores, float(positives.min())), start=1):
            removed[i] += (kept & ~passes).sum()
            kept &= passes
        chosen = np.flatnonzero(kept)
        if settings.sampling == "random" and len(chosen) > settings.negatives:
            draw = np.random.default_rng([settings.seed, text_hash(pairs.queries[query])])
            chosen = np.sort(draw.choice(chosen, settings.negatives, replace=False))
        chosen = chosen[: settings.negatives]
        return _Found(rows[chosen], scores[chosen], positives, len(rows))

    def _others(self, query: int, rows: NDArray[np.int64], same: set[str]) -> tuple[NDArray[np.int64], int]:
        """Of rows (below 0: none) those with another text than all of `same`, best first, and how many had one."""
        rows = rows[rows >= 0]
        cosine = _cosines(self.model.queries.take([query]), self.candidates.take(rows))
        rows = rows[np.lexsort((rows, -cosine))]
        texts = self.candidates.texts(rows.tolist())
        other = np.array([folded(text) not in same for text in texts], dtype=bool)
        return rows[other], int((~other).sum())

    def _filters(self, scores: NDArray[np.float64], lowest: float) -> Iterator[NDArray[np.bool_]]:
        """Which candidates pass each of the score filters, given the lowest score of a positive.

        A relative margin is of that score's size: of a negative score, too, what is kept lies below it.
        """
        of = self.settings
        every = np.ones(len(scores), dtype=bool)
        yield every if of.absolute_margin is None else scores <= lowest - of.absolute_margin
        yield every if of.relative_margin is None else scores <= lowest - abs(lowest) * of.relative_margin
        yield every if of.max_score is None else scores <= of.max_score
        yield every if of.min_score is None else scores >= of.min_score


def _read(file: Path) -> Block:
    try:
        with np.load(file) as found:
            return Block(**found)
    except (OSError, ValueError, EOFError, TypeError, BadZipFile) as error:
        fix = "remove this file: it is made again"
        raise UserError(f"is damaged ({error})", file=file, fix=fix) from error


class _Found(NamedTuple):
    rows: NDArray[np.int64]
    scores: NDArray[np.float64]
    positives: NDArray[np.float64]
    seen: int


def folded(text: str) -> str:
    """The text without what makes no other text of it: case, runs of spaces, compatible characters."""
    return " ".join(unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold()).split())


def _cosines(query: NDArray[np.float32], vectors: NDArray[np.float32]) -> NDArray[np.float64]:
    """Of a unit vector [1, D] with unit vectors [n, D], row by row: other rows change no digit of a row's."""
    return (vectors.astype(np.float64) * query).sum(axis=1)
