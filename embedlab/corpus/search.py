"""Exact semantic search over a folder: memory-mapped unit vectors and the texts that they stand for.

Layout: index.json (what made it), vectors.npy (float32 [n, D], rows of length one), texts.txt (a text a
line), offsets.npy (int64 [n + 1], where each line of texts.txt begins). A folder is complete or not there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from embedlab.config.read import read_record
from embedlab.corpus.vector_files import NpyFile
from embedlab.encoders.windows import BYTES, ROWS, windows
from embedlab.errors import UserError
from embedlab.evaluation.core.nearest import TopK, unit
from embedlab.evaluation.core.vectors import Encoder, Prompted, embed
from embedlab.files import check_replaceable, whole_folder

FILES = ("index.json", "vectors.npy", "offsets.npy", "texts.txt")
_FORMAT = 1
_FIX = "build the index again"
_SEARCHED_AT_ONCE = 1 << 16  # rows of vectors.npy read at once


@dataclass(frozen=True)
class IndexInfo:
    """index.json. encoder: how to load it again; fingerprint: of its weights and settings; source: the text
    file.
    """

    encoder: str
    fingerprint: str
    dim: int
    rows: int
    source: str
    created: str
    format: int = _FORMAT


@dataclass(frozen=True)
class Hit:
    """One result. row: of the indexed texts, counted from 0; score: cosine."""

    row: int
    score: float
    text: str


def build_index(
    folder: str | Path,
    texts: Iterable[str],
    encoder: Encoder,
    *,
    reference: str,
    fingerprint: str,
    source: str = "",
    overwrite: bool = False,
    rows: int = ROWS,
    size: int = BYTES,
) -> IndexInfo:
    """Encode `texts` and write the index; line breaks inside a text become spaces.

    Args:
        folder: to write; it appears when all is written.
        texts: read a window at a time, of at most `rows` texts and `size` bytes.
        encoder: gives the vectors.
        reference: how the encoder is loaded again.
        fingerprint: of the encoder.
        source: of the texts, for messages.
        overwrite: replace an index that is there.

    Raises:
        UserError: the folder exists (unless it is an index and `overwrite`); there is no text; one (its `index`) is
            too long for the tokenizer.
    """
    target = Path(folder)
    check_replaceable(target, ("index.json",), "a search index", overwrite)
    answering = Prompted(encoder, "document")
    with whole_folder(target) as work:
        offsets = [0]
        with (work / "texts.txt").open("wb") as text_file, (work / "vectors.npy").open("wb") as vector_file:
            vectors = NpyFile(vector_file)
            for window in windows(texts, rows, size):
                vectors.add(range(len(window)), _vectors(answering, window, vectors.count))
                for text in window:
                    line = (" ".join(text.splitlines()) + "\n").encode()
                    text_file.write(line)
                    offsets.append(offsets[-1] + len(line))
            vectors.close()
        if vectors.count == 0:
            raise UserError(
                "there is no text to index", file=source or None, fix="give a file with sentences"
            )
        np.save(work / "offsets.npy", np.asarray(offsets, dtype=np.int64))
        created = datetime.now(UTC).isoformat(timespec="seconds")
        info = IndexInfo(reference, fingerprint, vectors.dim, vectors.count, source, created)
        (work / "index.json").write_text(json.dumps(asdict(info), indent=2) + "\n", encoding="utf-8")
    return info


def _vectors(encoder: Encoder, texts: list[str], before: int) -> NDArray[np.float32]:
    try:
        return unit(embed(encoder, texts)).numpy()
    except UserError as error:
        if error.index is not None:
            error.index += before
        raise


class Index:
    """An index opened for queries; its vectors stay on disk and are read as they are searched.

    Raises UserError when `folder` is no whole index.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.info = _read_info(self.folder)
        for name in FILES:
            if (self.folder / name).is_symlink():  # what it leads to would be printed
                raise UserError("is a link", file=self.folder / name, fix=_FIX)
        try:
            self._vectors: NDArray[np.float32] = np.load(self.folder / "vectors.npy", mmap_mode="r")
            self._offsets: NDArray[np.int64] = np.load(self.folder / "offsets.npy", mmap_mode="r")
            size = (self.folder / "texts.txt").stat().st_size
        except (OSError, ValueError, EOFError, SyntaxError, TypeError) as error:  # numpy's, of its header
            raise UserError(f"is damaged ({error})", file=self.folder, fix=_FIX) from error
        of_vectors, of_offsets = (self.info.rows, self.info.dim), (self.info.rows + 1,)
        if (self._vectors.shape, self._vectors.dtype) != (of_vectors, np.float32):
            raise UserError("is damaged (vectors.npy is of another size)", file=self.folder, fix=_FIX)
        if (self._offsets.shape, self._offsets.dtype) != (of_offsets, np.int64):
            raise UserError("is damaged (offsets.npy is of another size)", file=self.folder, fix=_FIX)
        if self._offsets[0] != 0 or self._offsets[-1] != size or (np.diff(self._offsets) < 1).any():
            raise UserError("is damaged (offsets.npy does not fit texts.txt)", file=self.folder, fix=_FIX)

    def __len__(self) -> int:
        return self.info.rows

    def check_encoder(self, fingerprint: str) -> None:
        """UserError unless `fingerprint` is that of the encoder that made the index."""
        if fingerprint != self.info.fingerprint:
            raise UserError(
                f"was made by another encoder ({self.info.fingerprint[:12]}) than this one ({fingerprint[:12]})",
                file=self.folder,
                key="ckpt",
                fix=f"use ckpt={self.info.encoder} as it was, or build the index again",
            )

    def search(self, encoder: Encoder, queries: Sequence[str], k: int = 10) -> list[list[Hit]]:
        """The `k` nearest texts of each query by cosine, exact, best first."""
        vectors = unit(embed(Prompted(encoder, "query"), queries))
        if vectors.shape[1] != self.info.dim:
            raise UserError(
                f"holds vectors of width {self.info.dim}, the encoder gives {vectors.shape[1]}",
                file=self.folder,
            )
        top = TopK(vectors, k)
        for first in range(0, self.info.rows, _SEARCHED_AT_ONCE):
            # A copy of the block: torch does not take read-only memory.
            block = np.array(self._vectors[first : first + _SEARCHED_AT_ONCE])
            if not np.isfinite(block).all():
                raise UserError("is damaged (a vector is not finite)", file=self.folder, fix=_FIX)
            top.add(torch.from_numpy(block))
        with (self.folder / "texts.txt").open("rb") as stream:
            return [
                [Hit(row, score, self._text(stream, row)) for row, score in zip(rows, scores, strict=True)]
                for rows, scores in zip(top.rows.tolist(), top.scores.tolist(), strict=True)
            ]

    def _text(self, stream: Any, row: int) -> str:
        stream.seek(int(self._offsets[row]))
        line: bytes = stream.read(int(self._offsets[row + 1] - self._offsets[row]) - 1)
        try:
            return line.decode("utf-8")
        except UnicodeDecodeError:
            raise UserError("is not UTF-8", file=self.folder / "texts.txt", row=row + 1, fix=_FIX) from None


def _read_info(folder: Path) -> IndexInfo:
    path = folder / "index.json"
    if not path.is_file():
        fix = f"embedlab search index TEXTS {folder} ckpt=…"
        raise UserError("is no search index", file=folder, fix=fix)
    info = read_record(path, IndexInfo, _FIX)
    if info.format != _FORMAT:
        raise UserError(f"has format {info.format}, not {_FORMAT}", file=path, fix=_FIX)
    return info
