"""Texts to files of vectors, a chunk at a time: memory does not grow with their number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress, count
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from embedlab.corpus.inputs import Line, Texts, placing
from embedlab.corpus.parts import Counts, Parts
from embedlab.corpus.vector_files import VectorFile, read_vectors, vector_file
from embedlab.encoders.tokenization import Tokenization
from embedlab.encoders.windows import windows


class Encodes(Protocol):
    """What is asked of an encoder."""

    @property
    def dim(self) -> int: ...
    @property
    def tokenization(self) -> Tokenization: ...
    def encode(self, sentences: Sequence[str]) -> NDArray[np.float32]: ...


@dataclass(frozen=True)
class Chunks:
    """How lines are encoded together.

    Attributes:
        rows: of a chunk at most.
        size: bytes of text that are held at a time.
        empty: what becomes of a text without a letter: ``error``, ``zero`` or ``skip``.
        number: of a line, for files that have row numbers.
    """

    rows: int
    size: int
    empty: str
    number: Callable[[Line], int]

    def encode(self, lines: Iterable[Line], encoder: Encodes, target: VectorFile, counts: Counts) -> None:
        """Encode lines into a file, and count them.

        Raises:
            UserError: an empty text with ``empty=error``; a vector that is not finite, or cannot be stored.
        """
        tokens = encoder.tokenization
        limit = tokens.max_length or tokens.model_limit
        for chunk in windows(lines, self.rows, self.size, _text):
            kept = [bool(line.text.strip()) for line in chunk]
            if not all(kept) and self.empty == "error":
                raise chunk[kept.index(False)].error(
                    "an empty row", key="empty", value="error", fix="empty=zero, or empty=skip into parquet"
                )
            counts.rows += len(chunk)
            counts.empty += len(kept) - sum(kept)
            full = list(compress(chunk, kept))
            vectors = np.zeros((len(chunk), encoder.dim), dtype=np.float32)
            if full:
                with placing(full.__getitem__):
                    vectors[kept] = encoder.encode([line.text for line in full])
                _check_finite(full, vectors[kept])
                # No tokenizer makes more tokens of a text than it has bytes.
                if limit and (long := [line.text for line in full if 4 * len(line.text) >= limit]):
                    counts.cut += tokens.count_cut(text for text in long if len(text.encode()) >= limit)
            if self.empty == "skip":
                chunk, vectors = full, vectors[kept]
            if chunk:
                with placing(chunk.__getitem__):
                    target.add([self.number(line) for line in chunk], vectors)


def _text(line: Line) -> str:
    return line.text


def _check_finite(lines: Sequence[Line], vectors: NDArray[np.float32]) -> None:
    finite = np.isfinite(vectors).all(axis=1)
    if not finite.all():
        raise lines[int(np.flatnonzero(~finite)[0])].error(
            f"{int((~finite).sum())} vectors are not finite", fix="dtype=float32, or another checkpoint"
        )


def encode_parts(
    texts: Texts, parts: Parts, encoder: Encodes, chunks: Chunks, worker: int = 0, workers: int = 1
) -> Counts:
    """Write those parts p of a folder that are not there, with p ≡ `worker` modulo `workers`.

    Returns:
        Of the parts that were written now.
    """
    total = Counts()
    # Asked of each part as its turn comes: another process may have been there.
    wanted = (number for number in count(worker, workers) if parts.counts(number) is None)
    for number, lines in texts.parts(parts.manifest.part_rows, wanted):
        with parts.writing(number) as (target, counts):
            chunks.encode(lines, encoder, target, counts)
            texts.check_unchanged()  # the manifest has the sum of what was opened
        total.add(counts)
    return total


def join_parts(parts: Parts, path: Path) -> None:
    """Write a file of all vectors of a folder whose parts are all there, as they were encoded, and their ranges."""
    with vector_file(path, parts.codes, ranges=True) as target:
        for number in parts.whole():
            for rows, codes in read_vectors(parts.path(number)):
                target.append(rows, codes)
