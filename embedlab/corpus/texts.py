"""Many texts and their vectors in a folder: read by row, never all in memory; a kill costs one part."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from embedlab.errors import UserError
from embedlab.evaluation.core.nearest import unit
from embedlab.evaluation.core.vectors import Encoder, embed
from embedlab.files import whole_file, write_array

PART = 4096
"""Rows encoded and written at a time: a constant, since vectors of other batches may differ in their last digit."""


def text_hash(text: str) -> int:
    """64 bits that are the same on every machine and in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def write_texts(folder: Path, texts: Iterable[str]) -> None:
    """Write `folder`/texts.bin and `folder`/offsets.npy; the folder is made here."""
    folder.mkdir()
    offsets = [0]
    with (folder / "texts.bin").open("wb") as file:
        for text in texts:
            offsets.append(offsets[-1] + file.write(text.encode()))
    write_array(folder / "offsets.npy", np.array(offsets, dtype=np.int64))


class LinesFile:
    """Writes a search index's texts.txt, a text a line, and at the end offsets.npy: where each line begins."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._offsets = folder, [0]
        self._stream = (folder / "texts.txt").open("wb")

    @property
    def count(self) -> int:
        return len(self._offsets) - 1

    def add(self, texts: Iterable[str]) -> None:
        for text in texts:
            line = (" ".join(text.splitlines()) + "\n").encode()
            self._stream.write(line)
            self._offsets.append(self._offsets[-1] + len(line))

    def __enter__(self) -> LinesFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.close()
        write_array(self._folder / "offsets.npy", np.asarray(self._offsets, dtype=np.int64))


def mapped(file: Path, fix: str = "remove this file: it is made again") -> NDArray[Any]:
    """The array of a .npy file, mapped; UserError where it is damaged, with what to do."""
    try:
        found: NDArray[Any] = np.load(file, mmap_mode="r")
    except (OSError, ValueError, EOFError, SyntaxError, TypeError) as error:  # numpy's, of its header
        raise UserError(f"is damaged ({error})", file=file, fix=fix) from error
    return found


class StoredTexts(Sequence[str]):
    """The texts of a folder that `write_texts` wrote.

    Raises:
        UserError: it is damaged.
    """

    def __init__(self, folder: Path) -> None:
        fix = f"remove {folder.parent}: it is made again"
        self._offsets = mapped(folder / "offsets.npy", fix)
        file = folder / "texts.bin"
        size = file.stat().st_size if file.is_file() else -1
        if self._offsets.dtype != np.int64 or self._offsets[0] != 0 or self._offsets[-1] != size:
            raise UserError("is damaged (it does not fit offsets.npy)", file=file, fix=fix)
        self._bytes = np.memmap(file, mode="r") if size else np.empty(0, np.uint8)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> list[str]: ...
    def __getitem__(self, row: int | slice) -> str | list[str]:
        if isinstance(row, slice):
            return [self[i] for i in range(*row.indices(len(self)))]
        return self._bytes[self._offsets[row] : self._offsets[row + 1]].tobytes().decode()


class UnitVectors:
    """Vectors of length one of some texts, [n, D] float32 in files of `PART` rows.

    Args:
        folder: of the files.
        texts: that they stand for.
    """

    def __init__(self, folder: Path, texts: StoredTexts) -> None:
        self.folder, self.texts = folder, texts
        self._files: dict[int, NDArray[np.float32]] = {}

    def __len__(self) -> int:
        return len(self.texts)

    def encode(self, encoder: Encoder, on_part: Callable[[int], None] = lambda done: None) -> None:
        """Encode what is not there yet.

        Raises:
            UserError: a text that cannot be encoded, with its beginning.
        """
        self.folder.mkdir(exist_ok=True)
        for part in range(-(-len(self) // PART)):
            file = self._file(part)
            if not file.is_file():
                some = self.texts[part * PART : (part + 1) * PART]
                vectors = unit(embed(encoder, some)).numpy()
                with whole_file(file) as new:
                    write_array(new, vectors)
            on_part(min((part + 1) * PART, len(self)))

    def _file(self, part: int) -> Path:
        return self.folder / f"{part:06d}.npy"

    def _part(self, part: int) -> NDArray[np.float32]:
        if part not in self._files:
            self._files[part] = mapped(self._file(part))
        return self._files[part]

    def parts(self) -> Iterator[NDArray[np.float32]]:
        """All rows, in order."""
        for part in range(-(-len(self) // PART)):
            yield self._part(part)

    def take(self, rows: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float32]:
        """The vectors of some rows, [n, D]."""
        found = np.empty((len(rows), self._part(0).shape[1]), np.float32)
        for i, row in enumerate(rows):
            found[i] = self._part(int(row) // PART)[int(row) % PART]
        return found
