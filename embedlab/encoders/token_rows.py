"""Rows of token ids as two arrays: a list of lists takes nine times the memory, and its time is Python's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Row = Sequence[int] | NDArray[np.int32]


class TokenRows(NamedTuple):
    """Rows of ids one after another, not padded.

    Attributes:
        ids: of all rows.
        bounds: [n + 1]: row i is ``ids[bounds[i] : bounds[i + 1]]``.
        cut: [n], whether the text was cut.
    """

    ids: NDArray[np.int32]
    bounds: NDArray[np.int64]
    cut: NDArray[np.bool_]

    @classmethod
    def of(cls, rows: Sequence[Row], cut: Sequence[bool] | None = None) -> TokenRows:
        """Rows that are a list or an array each; none `cut` unless it says so."""
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        ids = np.concatenate([np.asarray(row, np.int32) for row in rows]) if rows else np.empty(0, np.int32)
        flags = np.zeros(len(rows), np.bool_) if cut is None else np.array(cut, np.bool_)
        return cls(ids, _bounds(lengths), flags)

    def filled(
        self, filler: int, left: bool, multiple: int = 1
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The rows as one matrix ``[n, L]``, and where it is no filler; L is rounded up to `multiple`."""
        lengths = np.diff(self.bounds)[:, None]
        length = max(1, -(-int(lengths.max(initial=0)) // multiple) * multiple)
        place = np.arange(length)
        real = place >= length - lengths if left else place < lengths
        ids = np.full(real.shape, filler, dtype=np.int64)
        ids[real] = self.ids
        return ids, real

    @classmethod
    def framed(
        cls,
        ids: NDArray[np.int32],
        lengths: NDArray[np.int64],
        prefix: Sequence[int],
        suffix: Sequence[int],
        limit: int | None = None,
        from_left: bool = False,
        filler: int = 0,
    ) -> TokenRows:
        """Sentences cut to a limit, with the same ids around each.

        Args:
            ids: of the sentences, one after another.
            lengths: of each.
            prefix, suffix: what stands around them.
            limit: tokens of a sentence that are kept; None: all.
            from_left: cut the beginning, not the end.
            filler: the only id of a row that would have none.
        """
        kept = lengths if limit is None else np.minimum(lengths, limit)
        starts = lengths.cumsum() - (kept if from_left else lengths)
        empty = kept + len(prefix) + len(suffix) == 0
        bounds = _bounds(kept + len(prefix) + len(suffix) + empty)
        out = np.empty(bounds[-1], np.int32)
        for column, value in enumerate(prefix):
            out[bounds[:-1] + column] = value
        for column, value in enumerate(suffix, -len(suffix)):
            out[bounds[1:] + column] = value
        out[bounds[:-1][empty]] = filler
        number = within(kept)
        out[np.repeat(bounds[:-1] + len(prefix), kept) + number] = ids[np.repeat(starts, kept) + number]
        return cls(out, bounds, lengths > kept)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row, [n]."""
        return np.diff(self.bounds)

    def take(self, chosen: NDArray[Any]) -> TokenRows:
        """Some of the rows, by number or by a flag each."""
        lengths = self.lengths[chosen]
        index = np.repeat(self.bounds[:-1][chosen], lengths) + within(lengths)
        return TokenRows(self.ids[index], _bounds(lengths), self.cut[chosen])

    def row(self, i: int) -> NDArray[np.int32]:
        """Row i."""
        return self.ids[self.bounds[i] : self.bounds[i + 1]]

    def rows(self) -> list[list[int]]:
        """The rows as lists."""
        ids, bounds = self.ids.tolist(), self.bounds.tolist()
        return [ids[start:end] for start, end in pairwise(bounds)]

    def as_bytes(self) -> list[bytes]:
        """The ids of each row as bytes."""
        ids, bounds = self.ids.tobytes(), (self.bounds * self.ids.itemsize).tolist()
        return [ids[start:end] for start, end in pairwise(bounds)]


def within(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """The number of each token in its row, from 0, for rows one after another."""
    return np.arange(int(lengths.sum())) - np.repeat(lengths.cumsum() - lengths, lengths)


def _bounds(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), lengths.cumsum()])
