"""Vectors on disk, read as unit rows: mapped .npy files, one after the other, in place; Parquet is copied first."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embedlab.corpus.parts import MANIFEST, Parts
from embedlab.corpus.vector_files import FORMATS, NpyFile, read_ranges, read_vectors
from embedlab.encoders.codes import RANGES, Codes
from embedlab.errors import UserError
from embedlab.evaluation.core.nearest import unit
from embedlab.files import sha256, write_array

BLOCK = 1 << 16
"""Rows that are read at once."""
_SAMPLE = 1024
_DTYPES = ("float16", "float32", "float64")
_FIX = "build the index again"
_TEXTS = "vectors of at least one text"


class Part(NamedTuple):
    """A .npy file of so many rows; a relative path is below the folder of the index."""

    path: Path
    rows: int


class Stored:
    """Vectors [n, D] of one or more .npy files, float32 and of length one when they are read.

    Args:
        parts: the files, in the order of their rows.
        codes: D, and how the files stand for vectors; of float32, any kind of float will do.
        is_unit: whether the rows have length one on the disk already, to the last digit.
        fix: what to do about a file that is damaged.

    Raises:
        UserError: a part that is missing, no array of floats, or of another size; by its name.
    """

    def __init__(self, parts: Sequence[Part], codes: Codes, is_unit: bool = False, fix: str = _FIX) -> None:
        self.parts = [_mapped(part, codes, fix) for part in parts]
        self.paths = [part.path for part in parts]
        self.codes, self.dim, self.is_unit, self._fix = codes, codes.dim, is_unit, fix
        self.starts: NDArray[np.int64] = np.cumsum([0, *(part.rows for part in parts)], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def pieces(self, most: int | None = None) -> Iterator[tuple[int, int]]:
        """First row and end of each stretch of at most `most` (None: `BLOCK`) rows; none lies in two files."""
        most = most or BLOCK
        for start, end in zip(self.starts[:-1].tolist(), self.starts[1:].tolist(), strict=True):
            yield from ((first, min(first + most, end)) for first in range(start, end, most))

    def block(self, first: int, end: int) -> Tensor:
        """Rows [first, end), which are of one file."""
        place = int(np.searchsorted(self.starts, first, side="right")) - 1
        start = int(self.starts[place])
        return self._read(place, slice(first - start, end - start))

    def held(self, first: int, end: int) -> NDArray[Any]:
        """What the file holds of rows [first, end), which are of one file: codes [end - first, width], mapped."""
        place = int(np.searchsorted(self.starts, first, side="right")) - 1
        start = int(self.starts[place])
        return self.parts[place][first - start : end - start]

    def sample(self) -> str:
        """Hex hash of some rows of every file as they are held: where texts are encoded anew, they are others."""
        digest, most = hashlib.sha256(), -(-_SAMPLE // len(self.parts))
        for part in self.parts:
            rows = np.unique(np.linspace(0, len(part) - 1, most).astype(np.int64))
            digest.update(f"{part.dtype} {part.shape}".encode() + part[rows].tobytes())
        return digest.hexdigest()

    def take(self, rows: NDArray[np.int64]) -> Tensor:
        """Rows [m] by number, in the order asked for: [m, D]."""
        order = np.argsort(rows, kind="stable")
        places = np.searchsorted(self.starts, rows[order], side="right") - 1
        found = torch.empty(len(rows), self.dim)
        for place in np.unique(places).tolist():
            chosen = order[places == place]
            found[torch.from_numpy(chosen)] = self._read(place, rows[chosen] - int(self.starts[place]))
        return found

    def _read(self, place: int, rows: Any) -> Tensor:
        held = self.parts[place][rows]
        floats = held.dtype.kind == "f"
        # A copy: torch does not take read-only memory.
        block = torch.from_numpy(np.array(held, np.float32) if floats else self.codes.decode(held))
        if not bool(torch.isfinite(block).all()):
            raise UserError("is damaged (a vector is not finite)", file=self.paths[place], fix=self._fix)
        return block if self.is_unit else unit(block)


def _mapped(part: Part, codes: Codes, fix: str) -> NDArray[Any]:
    try:
        found: NDArray[Any] = np.load(part.path, mmap_mode="r")
    except FileNotFoundError:
        raise UserError("no such file: a part of the vectors is missing", file=part.path, fix=fix) from None
    except (OSError, ValueError, EOFError, SyntaxError, TypeError) as error:  # numpy's, of its header
        raise UserError(f"is damaged ({error})", file=part.path, fix=fix) from error
    kinds = _DTYPES if codes.dtype.kind == "f" else (codes.dtype.name,)
    if not isinstance(found, np.ndarray) or found.dtype.name not in kinds:
        raise UserError(f"is no array of {', '.join(kinds)}", file=part.path, fix=fix)
    if found.shape != (shape := (part.rows, codes.width)):
        raise UserError(f"is damaged (it is {found.shape}, not {shape})", file=part.path, fix=fix)
    return found


@dataclass(frozen=True)
class Source:
    """Vectors as `embedlab encode` wrote them.

    files: .npy or .parquet, sorted; codes: how they are stored (None: as floats); first: the number of the first row,
    where they number rows; encoder, fingerprint: of what made them, and manifest: sha256 of the parts' manifest (""
    where that is not known).
    """

    files: list[Path]
    codes: Codes | None = None
    first: int = 1
    encoder: str = ""
    fingerprint: str = ""
    manifest: str = ""

    def identity(self) -> str:
        """What tells these vectors from others, without reading them all."""
        stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in self.files]
        return self.manifest or hashlib.sha256(repr(stats).encode()).hexdigest()


def find_vectors(path: Path) -> Source | None:
    """The vectors of a file, or of a folder of files or of parts; None where `path` holds texts.

    Raises:
        UserError: a folder without vectors, or of parts that are not all there.
    """
    if (path / MANIFEST).is_file():
        return _of_parts(Parts.read(path))
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.suffix.lower() in FORMATS and p.name[0] != ".")
        if not files:
            raise UserError("holds no .npy or .parquet file", file=path, fix="a folder of embedlab encode")
        return Source(files)
    kind = path.suffix.lower()
    is_one = path.is_file() and (kind == ".npy" or (kind == ".parquet" and _width(path) is not None))
    return Source([path]) if is_one else None


def _of_parts(parts: Parts) -> Source:
    manifest, there = parts.manifest, parts.complete()
    ranges = None
    if manifest.store in ("int8", "uint8"):
        ranges = read_ranges(parts.folder / RANGES, manifest.dim, "another copy, or encode again")
    codes = Codes(manifest.store, manifest.dim, ranges)  # type: ignore[arg-type]  # checked there
    files = [parts.path(number) for number, counts in there.items() if counts.vectors]
    known = (manifest.encoder, manifest.fingerprint, sha256(parts.folder / MANIFEST))
    return Source(files, codes, 0, *known)


def _width(path: Path) -> int | None:
    """Numbers of a row of the Parquet file's column ``vector``; None where it has none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        schema = pq.read_schema(path)
    except (OSError, pa.ArrowException) as error:
        raise _damaged(path, error) from None
    kind = schema.field("vector").type if "vector" in schema.names else None
    return kind.list_size if kind is not None and pa.types.is_fixed_size_list(kind) else None


def gather(source: Source, work: Path) -> tuple[list[Part], Codes, bool]:
    """Make mapped files of a source: .npy files stay where they are, Parquet is copied into ``work/vectors.npy``.

    Args:
        source: of one kind of file.
        work: the folder of the new index.

    Returns: the parts, how they are stored, and whether ``work/rows.npy`` (int64 [n], from 0 on) has the numbers of the
    rows, which Parquet says.

    Raises:
        UserError: files of both kinds or of two widths, no rows, a row that is not finite, a file that is damaged.
    """
    if not source.files:
        raise UserError("there is no vector", key="input", fix=_TEXTS)
    if len({path.suffix.lower() for path in source.files}) > 1:
        raise UserError("holds .npy and .parquet files", file=source.files[0].parent, fix="one kind of file")
    if source.files[0].suffix.lower() == ".parquet":
        return *_copied(source, work), True
    parts, codes = [], source.codes
    for path in source.files:
        try:
            shape = np.load(path, mmap_mode="r").shape
        except (OSError, ValueError, EOFError, SyntaxError, TypeError) as error:
            raise _damaged(path, error) from None
        if len(shape) != 2 or not shape[1]:
            told = f"is no table of vectors, but an array {shape}"
            raise UserError(told, file=path, fix="a file that embedlab encode wrote")
        codes = codes or Codes("float32", shape[1])
        if shape[1] != codes.width:
            raise UserError(f"is {shape[1]} wide, not {codes.width}", file=path, fix="files of one encoder")
        if shape[0]:
            parts.append(Part(path.resolve(), shape[0]))
    if not parts or codes is None:
        raise UserError("there is no vector", file=source.files[0], fix=_TEXTS)
    held = Stored(parts, codes, fix="encode it again")
    if source.codes is None:  # embedlab encode writes none that is not finite
        for piece in held.pieces():
            held.block(*piece)
    return parts, codes, False


def _copied(source: Source, work: Path) -> tuple[list[Part], Codes]:
    import pyarrow as pa

    numbers: list[NDArray[np.int64]] = []
    codes = source.codes
    with (work / "vectors.npy").open("wb") as stream:
        target = NpyFile(stream, codes)
        for path in source.files:
            width = _width(path)
            if width is None or (codes is not None and width != codes.width):
                what = f"has vectors of width {width}" if width else "has no column of vectors"
                raise UserError(what, file=path, fix=f"Parquet files as {source.files[0].name}")
            codes = codes or Codes("float32", width)
            try:
                for rows, held in read_vectors(path):
                    numbers.append(np.asarray(rows, np.int64) - source.first)
                    if source.codes is None:
                        target.add(rows, _floats(held))
                    else:
                        target.append(rows, held)
            except (OSError, pa.ArrowException, KeyError, ValueError) as error:
                raise _damaged(path, error) from None
            except UserError as error:
                error.file = error.file or str(path)
                raise
        if not target.count or codes is None:
            raise UserError("there is no vector", file=source.files[0], fix=_TEXTS)
        target.close()
    write_array(work / "rows.npy", np.concatenate(numbers))
    return [Part(Path("vectors.npy"), target.count)], codes


def _floats(held: NDArray[Any]) -> NDArray[np.float32]:
    if held.dtype.kind != "f":
        fix = "the folder of its parts, whose manifest says what they stand for"
        raise UserError(f"holds codes ({held.dtype}), no floats", fix=fix)
    return held.astype(np.float32)


def _damaged(path: Path, error: Exception) -> UserError:
    text = (str(error).splitlines() or [type(error).__name__])[0]
    return UserError(f"is damaged ({text})", file=path, fix="encode it again")
