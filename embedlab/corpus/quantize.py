"""Files and folders of vectors for `embedlab.encoders.codes`: calibrated on, and rewritten in another store."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embedlab.corpus.parts import MANIFEST, Counts, Parts
from embedlab.corpus.vector_files import FORMATS, VectorFile, read_vectors, vector_file
from embedlab.encoders.codes import RANGES, Codes, Store, calibrate
from embedlab.errors import UserError
from embedlab.files import like

_FIX = "vectors as embedlab encode writes them: a .npy or .parquet file, or a folder of parts"


def float_blocks(path: Path) -> Iterator[tuple[Sequence[int], NDArray[np.float32]]]:
    """The vectors of a .npy or .parquet file in blocks: rows [n] and float32 [n, D].

    Raises:
        UserError: no such file, another kind of file, one that holds no floats, or a row that is not finite.
    """
    if not path.is_file():
        raise UserError("no such file", file=path, fix=like(path) or _FIX)
    if path.suffix.lower() not in FORMATS:
        raise UserError("holds no vectors", file=path, fix=_FIX)
    blocks, before = read_vectors(path), 0
    while True:
        try:
            rows, found = next(blocks)
        except StopIteration:
            return
        except (OSError, ValueError, EOFError, SyntaxError, TypeError, KeyError, AttributeError) as error:
            text = " ".join(str(error).split())[:200]
            raise UserError(f"holds no vectors ({text})", file=path, fix=_FIX) from error
        if found.ndim != 2 or found.dtype not in (np.float32, np.float16, np.float64):
            told = f"holds {found.dtype} of shape {found.shape[1:]} a row, no floats"
            raise UserError(told, file=path, fix=_FIX)
        finite = np.isfinite(found).all(axis=1)
        if not finite.all():
            row = before + int(np.flatnonzero(~finite)[0]) + 1
            raise UserError("a vector is not finite", file=path, row=row, fix="encode that text again")
        before += len(found)
        yield rows, np.asarray(found, dtype=np.float32)


def calibration(path: Path) -> NDArray[np.float32]:
    """The ranges [2, D] that ``calibration=FILE`` names: a `RANGES` file, or those of a file of vectors.

    Raises:
        UserError: as `float_blocks`; a file without rows.
    """
    try:
        if path.name != RANGES:
            return calibrate(vectors for _, vectors in float_blocks(path))
        ranges = np.concatenate([vectors for _, vectors in float_blocks(path)])
        if len(ranges) != 2 or not (ranges[0] <= ranges[1]).all():
            raise UserError("holds no ranges: two rows, the least and the largest values", fix="another copy")
        return ranges
    except UserError as error:
        error.file, error.key = error.file or str(path), error.key or "calibration"
        raise


class Source:
    """A file of vectors, or a folder of parts that are all there.

    Raises:
        UserError: it is none, holds codes already, or lacks parts.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.parts = Parts.read(path) if path.is_dir() else None
        self.files = [path]
        if self.parts is None:
            next(float_blocks(path), None)  # what is no file of vectors is told now
            return
        if (store := self.parts.manifest.store) not in ("float32", "float16"):
            fix = "the floats that they were made of"
            raise UserError(f"holds {store} codes", file=path / MANIFEST, key="input", fix=fix)
        self.files = [self.parts.path(number) for number in self.parts.complete()]

    def vectors(self) -> Iterator[NDArray[np.float32]]:
        """Every block, [n, D]."""
        for file in self.files:
            yield from (vectors for _, vectors in float_blocks(file))


@dataclass(frozen=True)
class Quantized:
    """What was written: rows, bytes before and after, and the mean cosine of the first rows with their floats."""

    rows: int
    before: int
    after: int
    cosine: float


def quantize(source: Source, out: Path, store: Store, ranges: NDArray[np.float32] | None = None) -> Quantized:
    """Write vectors in another store: a file to a file, a folder of parts to one, part by part.

    A folder that was begun goes on. Of int8 and uint8 the ranges stand beside the output, in `RANGES`.

    Args:
        source: of the vectors.
        out: a .npy or .parquet file, or a folder.
        store: of the output.
        ranges: [2, D] of `calibration`; None: those of the source itself.

    Raises:
        UserError: no rows, one that is not finite, ranges of another width, an output that holds other things.
    """
    first = next(source.vectors(), None)
    if first is None:
        raise UserError("has no rows", file=source.path, fix=_FIX)
    if ranges is None and store in ("int8", "uint8"):
        ranges = calibrate(source.vectors())
    codes = Codes(store, first.shape[1], ranges)
    if source.parts is None:
        with vector_file(out, codes, ranges=True) as target:
            _copy(source.path, target)
        rows, after = target.count, out.stat().st_size
    else:
        rows, after = _quantize_parts(source.parts, out, codes)
    before = sum(file.stat().st_size for file in source.files)
    return Quantized(rows, before, after, _mean_cosine(first, codes.decode(codes.encode(first))))


def _quantize_parts(source: Parts, out: Path, codes: Codes) -> tuple[int, int]:
    """Write every part that is not there; rows and bytes of all."""
    assert not codes.calibrated or codes.ranges is not None
    digest = hashlib.sha256(codes.ranges.tobytes()).hexdigest() if codes.ranges is not None else None
    manifest = replace(source.manifest, store=codes.store, ranges=digest if codes.calibrated else None)
    parts, total = Parts.begin(out, manifest, codes), Counts()
    for number, counts in source.complete().items():
        total.add(counts)
        if parts.counts(number) is None:
            with parts.writing(number) as (target, written):
                _copy(source.path(number), target)
                written.add(replace(counts, vectors=0))
    parts.finish(total.rows)
    return total.vectors, sum(parts.path(number).stat().st_size for number in parts.whole())


def _copy(file: Path, target: VectorFile) -> None:
    for rows, vectors in float_blocks(file):
        target.add(rows, vectors)


def _mean_cosine(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return float(((a * b).sum(axis=1) / np.where(lengths == 0, 1, lengths)).mean())
