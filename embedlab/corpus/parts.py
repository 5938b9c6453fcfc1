"""A folder of vectors in parts, which any number of processes fill together, and go on to fill after any of them died.

Part p holds the vectors of the input's rows [p R, (p + 1) R), counted from 0 over all files. Layout:

manifest.json
    What decides every byte, written by whoever comes first and compared by all others: the keys of `Manifest`.
part-000012.parquet
    Columns ``row`` (int64, of the whole input) and ``vector`` (a list of `Codes.width` numbers of the store's type);
    with ``format=npy`` part-000012.npy, [rows, width], which has a row of zeros for each text that is empty.
ranges.npy
    [2, D] float32, least and largest value of each feature, where the store is int8 or uint8.
part-000012.json
    The part's sidecar, written after it: ``rows`` of the input (R, or fewer in the last part), ``vectors`` (fewer than
    rows with ``empty=skip``), ``empty`` and ``cut`` texts, ``bytes`` and ``sha256`` of the part. A part without one, or
    of another size, is not there.
done.json
    Once all are there: ``parts``, ``rows`` and ``vectors``.

Every file appears whole. None says when or where it was written: two runs of one manifest are equal byte for byte.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from operator import eq
from pathlib import Path
from typing import Any

from embedlab.config.read import record
from embedlab.corpus.vector_files import VectorFile, vector_file, write_ranges
from embedlab.encoders.codes import RANGES, Codes
from embedlab.encoders.folder import same_encoder
from embedlab.errors import UserError
from embedlab.files import made, sha256, write_new, write_whole

MANIFEST, DONE = "manifest.json", "done.json"
_FORMAT = 1
NAMES = rf"{DONE}|{RANGES}|part-\d{{6,}}\.(json|npy|parquet)"
"""A pattern of the names of all files but the manifest."""
_SIDECAR = re.compile(r"part-(\d{6,})\.json")
_AGAIN = "encode again, in another folder"


@dataclass(frozen=True)
class Manifest:
    """manifest.json: what decides the bytes of every part.

    Attributes:
        format: of the folder, 1.
        encoder: how `embedlab.load` finds it: a path or a hub id. Not compared; ``fingerprint`` is.
        revision: commit of its weights on the hub, where it is known. Not compared.
        dim: D, features of a vector.
        prompt: text before each sentence.
        max_length: of the tokenization; None: as long as the model allows.
        pooling: its configuration, ``name`` and settings.
        dtype: of the arithmetic; None: that of the weights.
        normalize: vectors of length one.
        store: what is written: float32, float16, int8, uint8, binary or ubinary.
        ranges: sha256 of ranges.npy ([2, D], lo and hi), which int8 and uint8 decode by; else None.
        suffix: of the parts, ``.parquet`` or ``.npy``.
        empty: rows without text: error, zero or skip.
        batch_size, chunk, window: how rows are encoded together, which decides last digits.
        part_rows: R.
        files: of the input, in order: ``path`` (not compared), ``column`` with the text (None where there is one
            without a name), ``header`` where a number is its name and not its place,
            ``bytes``, and ``sha256``, or ``modified`` (nanoseconds) with ``input_hash=stat``.
        fingerprint: `Encoder.fingerprint`, of weights and settings.
    """

    encoder: str
    revision: str | None
    dim: int
    prompt: str
    max_length: int | None
    pooling: dict[str, Any]
    dtype: str | None
    normalize: bool
    store: str
    ranges: str | None
    suffix: str
    empty: str
    batch_size: int | None
    chunk: int
    window: int
    part_rows: int
    files: list[dict[str, Any]]
    fingerprint: str
    format: int = _FORMAT

    def text(self) -> str:
        """The file's content."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"

    def check(self, found: Manifest, file: Path) -> None:
        """UserError, with the first key, where another manifest stands for other bytes."""
        theirs, ours = found._compared(), self._compared()
        for key in (*ours, *theirs):
            same: Callable[[Any, Any], bool] = same_encoder if key == "fingerprint" else eq
            if not same(theirs.get(key), ours.get(key)):
                told, fix = self._told(key, theirs.get(key), ours.get(key))
                raise UserError(told, file=file, fix=f"{fix} that it was begun with, or another folder")

    def _told(self, key: str, was: Any, now: Any) -> tuple[str, str]:
        """What differs from the folder's manifest, and what is to be as it was."""
        of, _, what = key.rpartition("].")
        name, one = (what, self.files[int(of.removeprefix("files["))]) if of else (key, {})
        if name in ("bytes", "sha256", "modified") and None not in (was, now):
            return f"{one['path']} is another one now: its {name} was {was} and is {now}", "the file"
        if name in ("sha256", "modified"):
            hashes = ("sha256", "stat") if "modified" in one else ("stat", "sha256")
            name, was, now = "input_hash", *hashes
        elif of:
            name = f"the {name} of {one['path']}"
            was, now = (False if value is None and what == "header" else value for value in (was, now))
        return f"{name} is {_plain(was)}, this run has {_plain(now)}", "the settings"

    def _compared(self) -> dict[str, Any]:
        flat: dict[str, Any] = {}
        for key, value in asdict(self).items():
            if key == "files":
                flat["number of files"] = len(value)
                flat |= {
                    f"files[{i}].{k}": v for i, f in enumerate(value) for k, v in f.items() if k != "path"
                }
            elif isinstance(value, dict):
                flat |= {f"{key}.{k}": v for k, v in value.items()}
            elif key not in ("encoder", "revision"):
                flat[key] = value
        return flat

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Of a folder of parts.

        Raises:
            UserError: there is none, it is damaged, or of a newer format.
        """
        file = folder / MANIFEST
        values = read_json(file, "no folder of encoded parts" if folder.is_dir() else "no such folder")
        if values.get("format") != _FORMAT:
            raise UserError(f"is of format {values.get('format')}", file=file, fix="a newer embedlab")
        found = record(cls, values, file, fix=_AGAIN)
        if min(found.part_rows, found.dim) < 1:
            raise UserError("is damaged (part_rows and dim are from 1 up)", file=file, fix=_AGAIN)
        return found


def _plain(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)


def read_json(file: Path, missing: str) -> dict[str, Any]:
    """A file that holds a JSON object.

    Raises:
        UserError: it is not there (what that means: `missing`), or is damaged.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("no JSON object")
    except FileNotFoundError:
        raise UserError(missing, file=file.parent, fix=f"one with a {file.name}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"is damaged ({error})", file=file, fix=_AGAIN) from error
    return values


@dataclass
class Counts:
    """Of a part: rows of the input, vectors written, empty rows, and texts that were cut."""

    rows: int = 0
    vectors: int = 0
    empty: int = 0
    cut: int = 0

    def add(self, other: Counts) -> None:
        """Add another part's."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class Parts:
    """A folder of parts.

    Args:
        folder: that holds them.
        manifest: of it.
        codes: how rows are stored; needed to write.
    """

    def __init__(self, folder: Path, manifest: Manifest, codes: Codes | None = None) -> None:
        self.folder, self.manifest, self.codes = folder, manifest, codes

    @classmethod
    def begin(cls, folder: Path, manifest: Manifest, codes: Codes) -> Parts:
        """Open a folder to write parts into it, which is made if it is not there.

        Raises:
            UserError: it holds other things, or parts of another manifest.
        """
        check_folder(folder)
        with made(folder):
            if not write_new(folder / MANIFEST, manifest.text()):
                manifest.check(Manifest.read(folder), folder / MANIFEST)
        if codes.calibrated:
            write_ranges(folder / RANGES, codes)
        return cls(folder, manifest, codes)

    @classmethod
    def read(cls, folder: Path) -> Parts:
        """Open a folder to read.

        Raises:
            UserError: it is none.
        """
        return cls(folder, Manifest.read(folder))

    def path(self, number: int) -> Path:
        """Of a part."""
        return self.folder / f"part-{number:06}{self.manifest.suffix}"

    def sidecar(self, number: int) -> Path:
        """Of a part."""
        return self.folder / f"part-{number:06}.json"

    def whole(self) -> dict[int, Counts]:
        """The parts that are there, by number, in order."""
        names = sorted(m[1] for name in os.listdir(self.folder) if (m := _SIDECAR.fullmatch(name)))
        found = {number: self.counts(number) for number in map(int, names)}
        return {number: counts for number, counts in sorted(found.items()) if counts is not None}

    def counts(self, number: int) -> Counts | None:
        """Of a part; None where it is not there."""
        try:
            values = json.loads(self.sidecar(number).read_text(encoding="utf-8"))
            if self.path(number).stat().st_size == values["bytes"]:
                return Counts(**{field.name: int(values[field.name]) for field in fields(Counts)})
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return None

    def complete(self) -> dict[int, Counts]:
        """As `whole`, of a folder that says it has all.

        Raises:
            UserError: a part is missing, or done.json is.
        """
        there, done = self.whole(), self.folder / DONE
        says = read_json(done, "") if done.is_file() else {"parts": len(there), "rows": 0}
        if not all(type(says.get(key)) is int for key in ("parts", "rows")):
            raise UserError("is damaged", file=done, fix="embedlab encode … check=true writes it anew")
        missing = next((self.path(n).name for n in range(says["parts"]) if n not in there), None)
        rows = sum(counts.rows for counts in there.values())
        if missing or not done.is_file() or rows != says["rows"]:
            what = (
                f"{missing} is missing"
                if missing
                else f"its parts have {rows:,} rows, {DONE} says {says['rows']:,}"
            )
            what = what if missing or done.is_file() else f"has no {DONE}"
            raise UserError(
                what, file=self.folder, fix="encode the rest; embedlab encode … check=true lists it"
            )
        return there

    @contextmanager
    def writing(self, number: int) -> Iterator[tuple[VectorFile, Counts]]:
        """Gives the file of a part and what is to be counted; at the end the part is there, or is not."""
        counts = Counts()
        path = self.path(number)
        with vector_file(path, self.codes) as target:
            yield target, counts
        counts.vectors = target.count
        record = asdict(counts) | {"bytes": path.stat().st_size, "sha256": sha256(path)}
        write_whole(self.sidecar(number), json.dumps(record, indent=2) + "\n")

    def damaged(self, number: int) -> bool:
        """Whether the bytes of a part that is there differ from its sidecar's sum."""
        values = read_json(self.sidecar(number), "no such part")
        return sha256(self.path(number)) != values.get("sha256")

    def total(self) -> Counts:
        """Of all parts that are there."""
        total = Counts()
        for counts in self.whole().values():
            total.add(counts)
        return total

    def faults(self, rows: int) -> Iterator[tuple[int, str]]:
        """The parts of so many rows that are not as they should be, by number, each with what it is.

        All bytes are read. The sidecar of a damaged part is removed: whoever encodes next writes the part anew.
        """
        size = self.manifest.part_rows
        for number, start in enumerate(range(0, rows, size)):
            counts = self.counts(number)
            if counts is None:
                yield number, "missing"
            elif counts.rows != min(size, rows - start) or self.damaged(number):
                self.sidecar(number).unlink()
                yield number, "damaged"

    def finish(self, rows: int) -> Counts | None:
        """Write done.json if the parts of so many rows are there.

        Returns:
            What they hold; None where parts are missing.
        """
        total = self.total()
        if total.rows != rows:
            return None
        record = {"parts": -(-rows // self.manifest.part_rows), "rows": rows, "vectors": total.vectors}
        write_whole(self.folder / DONE, json.dumps(record, indent=2) + "\n")
        return total


def check_folder(folder: Path, overwrite: bool = False) -> None:
    """UserError where a folder is a file, or holds other things than parts, or is to be replaced, which no folder of
    parts is: others may write in it, and what was begun with the same settings goes on.

    Hidden ones do not count: a writer is about to name them.
    """
    if overwrite:
        fix = "leave it out to go on with what is there, or name another folder"
        raise UserError(
            "a folder of parts is not replaced", file=folder, key="overwrite", value="true", fix=fix
        )
    if folder.exists() and not folder.is_dir():
        raise UserError("is a file", file=folder, key="output", fix="name a folder")
    names = [n for n in os.listdir(folder) if not n.startswith(".")] if folder.is_dir() else []
    if names and MANIFEST not in names:
        raise UserError(
            f"holds other things than encoded parts, such as {min(names)}",
            file=folder,
            key="output",
            fix="another folder, or empty it",
        )
