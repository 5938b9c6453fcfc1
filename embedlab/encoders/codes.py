"""Vectors in fewer bytes: 8-bit steps of a calibrated range, or one bit a feature; scored by float queries.

Every store is affine in its levels, so a float query is scored without being quantised and codes without being decoded:
a feature is ``scale * level + offset``, hence ``q . x = (q * scale) . levels + q . offset``.

======== ===================== ============== ==================== ===============
store    code                  level          scale                offset
======== ===================== ============== ==================== ===============
uint8    u = floor((x-lo)/s)   u, 0 to 255    s = (hi - lo) / 255  lo + s / 2
int8     u - 128               u              as uint8             as uint8
ubinary  packed bits, x > 0    bit, 0 or 1    2                    -1
binary   ubinary XOR 0x80      bit            2                    -1
======== ===================== ============== ==================== ===============

A binary code is a byte of eight features, the first one in the highest bit, as `numpy.packbits` and faiss have it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from embedlab.errors import UserError, one_of

log = logging.getLogger(__name__)

Store = Literal["float32", "float16", "int8", "uint8", "binary", "ubinary"]
STORES: tuple[Store, ...] = get_args(Store)
RANGES = "ranges.npy"
"""[2, D] float32, the least and the largest value of each feature: one file for all shards and parts."""
_DTYPES = {"binary": "int8", "ubinary": "uint8"}
_LEVELS = 255
_FEW = 1000
"""Rows below which the extremes of a sample say little of those of a corpus."""


@dataclass(frozen=True, eq=False)
class Codes:
    """How the rows of a store stand for vectors.

    Args:
        store: one of `STORES`.
        dim: D, features of a vector.
        ranges: [2, D], the least and the largest value of each feature (`calibrate`); only int8 and uint8 read it.

    Raises:
        UserError: an unknown store, no ranges where they are needed, or ranges of another width.
    """

    store: Store
    dim: int
    ranges: NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        check_store(self.store)
        if not self.calibrated:
            return
        if self.ranges is None:
            fix = f"calibration=FILE of vectors of the same encoder, {_FEW:,} or more"
            raise UserError("needs the range of each feature", key="store", value=self.store, fix=fix)
        if self.ranges.shape != (2, self.dim):
            problem = f"is of width {self.ranges.shape[-1]}, the vectors are of width {self.dim}"
            raise UserError(f"the calibration {problem}", key="calibration", fix="one of the same encoder")

    @property
    def calibrated(self) -> bool:
        """Whether the codes depend on `ranges`."""
        return self.store in ("int8", "uint8")

    @property
    def packed(self) -> bool:
        """Whether a code is a bit a feature."""
        return self.store in _DTYPES

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the codes."""
        return np.dtype(_DTYPES.get(self.store, self.store))

    @property
    def width(self) -> int:
        """Numbers of a row of codes: D, or with a bit a feature ceil(D / 8)."""
        return -(-self.dim // 8) if self.packed else self.dim

    @property
    def scale(self) -> NDArray[np.float32]:
        """What a level is multiplied by, [D]."""
        if self.ranges is not None and self.calibrated:
            return (self.ranges[1] - self.ranges[0]) / np.float32(_LEVELS)
        return np.full(self.dim, 2.0 if self.packed else 1.0, dtype=np.float32)

    @property
    def offset(self) -> NDArray[np.float32]:
        """What is added to it, [D]."""
        if self.ranges is not None and self.calibrated:
            # A feature that is constant in the calibration decodes to its value: its scale is zero.
            return self.ranges[0] + self.scale / 2
        return np.full(self.dim, -1.0 if self.packed else 0.0, dtype=np.float32)

    def encode(self, vectors: NDArray[np.floating[Any]]) -> NDArray[Any]:
        """Vectors [n, D] to codes [n, `width`].

        Raises:
            UserError: another width, or a row that is not finite (its `index`).
        """
        vectors = np.asarray(vectors, dtype=np.float32)
        if vectors.ndim != 2 or vectors.shape[1] != self.dim:
            told = f"vectors of shape {vectors.shape} have not {self.dim} features"
            raise UserError(told, key="store", fix="ranges and vectors of one encoder")
        check_finite(vectors)
        if self.packed:
            bits = np.packbits(vectors > 0, axis=1)
            return (bits ^ 0x80).view(np.int8) if self.store == "binary" else bits
        if not self.calibrated:
            return vectors.astype(self.dtype)
        assert self.ranges is not None
        scale = self.scale
        steps = np.floor((vectors - self.ranges[0]) / np.where(scale == 0, np.float32(1), scale))
        levels = steps.clip(0, _LEVELS).astype(np.uint8)
        return (levels ^ 0x80).view(np.int8) if self.store == "int8" else levels

    def levels(self, codes: NDArray[Any]) -> NDArray[np.float32]:
        """Codes [n, `width`] to levels [n, D].

        Raises:
            UserError: codes of another width or another type.
        """
        codes = np.ascontiguousarray(codes)
        if codes.ndim != 2 or codes.shape[1] != self.width or codes.dtype != self.dtype:
            told = f"{codes.dtype} of shape {codes.shape} is no {self.store} of {self.dim} features"
            raise UserError(
                told, key="store", value=self.store, fix="the store and width it was written with"
            )
        if self.store in ("int8", "binary"):
            codes = codes.view(np.uint8) ^ np.uint8(0x80)
        if self.packed:  # the bits after the last feature are padding
            codes = np.unpackbits(codes.view(np.uint8), axis=1, count=self.dim)
        return codes.astype(np.float32)

    def decode(self, codes: NDArray[Any]) -> NDArray[np.float32]:
        """Codes [n, `width`] to vectors [n, D]; of a bit a feature -1 or 1."""
        return self.levels(codes) * self.scale + self.offset

    def scores(self, queries: NDArray[np.float32], codes: NDArray[Any]) -> NDArray[np.float32]:
        """Inner products [q, n] of float queries [q, D] with what codes [n, `width`] stand for."""
        products = (queries * self.scale) @ self.levels(codes).T + (queries @ self.offset)[:, None]
        return products.astype(np.float32, copy=False)


def check_store(store: str) -> None:
    """UserError for a store that is none of `STORES`."""
    if store not in STORES:
        raise UserError("no such store", key="store", value=store, fix=one_of(store, STORES))


def calibrate(blocks: Iterable[NDArray[np.floating[Any]]]) -> NDArray[np.float32]:
    """The least and the largest value of each feature, [2, D], over blocks [n, D] of vectors.

    Raises:
        UserError: no row, or one that is not finite (its `index`).
    """
    ranges: NDArray[np.float32] | None = None
    rows = 0
    for block in blocks:
        if not len(block):
            continue
        block = np.asarray(block, dtype=np.float32)
        check_finite(block, rows)
        rows += len(block)
        low, high = block.min(axis=0), block.max(axis=0)
        if ranges is not None:
            low, high = np.minimum(low, ranges[0]), np.maximum(high, ranges[1])
        ranges = np.stack([low, high])
    if ranges is None:
        raise UserError("has no rows", key="calibration", fix=f"{_FEW:,} vectors or more")
    if rows < _FEW:
        log.warning("the ranges of %d rows: %s rows or more say more of a corpus", rows, f"{_FEW:,}")
    return ranges


def check_finite(vectors: NDArray[np.floating[Any]], before: int = 0) -> None:
    """UserError (its `index` counts from `before`) where a row of [n, D] is not finite."""
    finite = np.isfinite(vectors).all(axis=1)
    if not finite.all():
        row = int(np.flatnonzero(~finite)[0])
        raise UserError("a vector is not finite", index=before + row, fix="encode that text again")
