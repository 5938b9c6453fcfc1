"""The token table: rows of token ids on disk, memory-mapped, with where each row came from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import NDArray

from embedlab.config.read import read_record, record
from embedlab.data.cached import Damaged
from embedlab.data.tokenise import Chunk, FieldJob, Tokens
from embedlab.errors import UserError

FORMAT = 3
"""Raised when the files or the meaning of their content change: older tables are then built anew."""
_META = "meta.json"
_LOOKED_AT = 1 << 22  # ids at once
REPORT = "report.json"


class DamagedTable(Damaged):
    """The folder is not a whole token table."""


@dataclass(frozen=True)
class FieldView:
    """One field of every row.

    Attributes:
        ids: uint16 or uint32 [tokens], all rows one after the other.
        offsets: int64 [n + 1]; row i is ``ids[offsets[i]:offsets[i + 1]]``.
        hashes: uint64 [n], of the text (the same text has the same hash in every field and table).
        pad_id: what fills a batch up.
    """

    ids: NDArray[Any]
    offsets: NDArray[np.int64]
    hashes: NDArray[np.uint64]
    pad_id: int

    def row(self, i: int) -> NDArray[Any]:
        return self.ids[self.offsets[i] : self.offsets[i + 1]]


@dataclass(frozen=True)
class _Field:
    role: str
    dtype: Literal["uint16", "uint32"]
    pad_id: int
    tokens: int


@dataclass(frozen=True)
class _Meta:
    """What `meta.json` says; its `fields` are each a `_Field`."""

    format: int
    n_rows: int
    roles: list[str]
    fields: dict[str, dict[str, Any]]
    numbers: dict[str, Literal["f4", "i8"]]
    tables: list[str]
    groups: list[str]
    frame: list[int | None] | None
    report: dict[str, Any]
    digest: str
    """Of all the others: the report is printed as it stands."""


def _digest(meta: Mapping[str, Any]) -> str:
    text = json.dumps({key: value for key, value in meta.items() if key != "digest"}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class TokenTable:
    """An opened token table.

    Attributes:
        folder: its files.
        fields: name -> `FieldView`.
        numbers: numeric columns of the kind of data: name -> float32 or int64 [n].
        n_rows: rows.
        table_names: files (or other tables) that the rows came from.
        groups: names of the language pairs; empty where there are none.
        group_of: place in `groups` of every row [n].
        frame: of a table for packing, the tokens that packed rows begin (None: no special ones) and end with.
        report: the data report (`embedlab.data.report`).
    """

    def __init__(self, folder: Path, meta: _Meta) -> None:
        self.folder = folder
        self.n_rows = meta.n_rows
        self.table_names = meta.tables
        self.groups = meta.groups
        self.frame = meta.frame
        self.report = meta.report
        self.numbers: dict[str, NDArray[Any]] = {
            name: self._map(f"{name}.{dtype}", np.dtype(dtype), self.n_rows)
            for name, dtype in meta.numbers.items()
        }
        self._tables = self._map("table.i4", np.int32, self.n_rows, below=len(meta.tables))
        self._rows = self._map("row.i8", np.int64, self.n_rows)
        self.group_of: NDArray[np.uint16] = (
            self._map("group.u2", np.uint16, self.n_rows, below=len(meta.groups))
            if meta.groups
            else np.zeros(self.n_rows, np.uint16)
        )
        hashes = [self._map(f"hash{i}.u8", np.uint64, self.n_rows) for i in range(len(meta.roles))]
        self.fields: dict[str, FieldView] = {}
        for i, (name, values) in enumerate(meta.fields.items()):
            field = record(_Field, values, folder / _META, f"fields.{name}")
            ids = self._map(f"ids{i}.bin", np.dtype(field.dtype), field.tokens)
            offsets = self._map(f"offsets{i}.i8", np.int64, self.n_rows + 1)
            if offsets[0] != 0 or offsets[-1] != field.tokens or (np.diff(offsets) < 0).any():
                raise DamagedTable(f"{folder}: offsets{i}.i8 does not say where rows begin")
            self.fields[name] = FieldView(ids, offsets, hashes[meta.roles.index(field.role)], field.pad_id)

    @classmethod
    def open(cls, folder: Path) -> TokenTable:
        """Map a table into memory; nothing but the description is read.

        Raises:
            DamagedTable: not a whole table of this format.
        """
        try:
            meta = read_record(folder / _META, _Meta)
            if meta.format != FORMAT:
                raise DamagedTable(f"{folder} has format {meta.format}, not {FORMAT}")
            if meta.digest != _digest(vars(meta)):
                raise DamagedTable(f"{folder}: {_META} is not as it was written")
            return cls(folder, meta)
        except (OSError, ValueError, UserError) as bad:
            raise DamagedTable(f"{folder}: {bad}") from bad

    def check_ids(self, most: Mapping[str, int]) -> None:
        """See that no id is past a vocabulary, where it would end the run in the middle, on a card without a word.

        Args:
            most: the highest id of each field's tokenizer.

        Raises:
            DamagedTable: one is.
        """
        for name, view in self.fields.items():
            for start in range(0, len(view.ids), _LOOKED_AT):
                if view.ids[start : start + _LOOKED_AT].max() > most[name]:
                    raise DamagedTable(
                        f"{self.folder}: {name} has ids past the vocabulary of {most[name] + 1:,}"
                    )

    def views(self, row: int) -> Iterable[str]:
        """The fields that a row has."""
        return self.fields

    def lengths(self, field: str) -> NDArray[np.int32]:
        """Tokens of every row [n]."""
        return np.diff(self.fields[field].offsets).astype(np.int32)

    @cached_property
    def longest(self) -> NDArray[np.int32]:
        """Tokens of the longest field of every row [n]: what a batch of all views is padded to."""
        return np.max([self.lengths(name) for name in self.fields], axis=0)

    def describe(self, rows: Sequence[int], most: int = 8) -> str:
        """Where rows came from, as ``file:row, file:row, ...``."""
        places = [f"{self.table_names[self._tables[i]]}:{self._rows[i]}" for i in rows[:most]]
        more = len(rows) - len(places)
        return ", ".join(places) + (f" and {more} more" if more > 0 else "")

    def _map(self, name: str, dtype: Any, count: int, below: int | None = None) -> NDArray[Any]:
        path = self.folder / name
        if path.stat().st_size != count * np.dtype(dtype).itemsize:
            raise DamagedTable(f"{path} has {path.stat().st_size} bytes")
        # Copy on write: torch takes no array that is read-only.
        found = np.memmap(path, dtype=dtype, mode="c", shape=(count,))
        if below is not None and not (found.min() >= 0 and found.max() < below):
            raise DamagedTable(f"{path} names what there is not")
        return found


class TableWriter:
    """Writes a table chunk by chunk into an empty folder; it is whole once `finish` has returned."""

    def __init__(
        self,
        folder: Path,
        roles: Sequence[str],
        jobs: Mapping[str, FieldJob],
        grouped: bool,
        numbers: Mapping[str, str],
    ) -> None:
        self.folder = folder
        self.roles = list(roles)
        self.jobs = jobs
        self.numbers = dict(numbers)
        self.lengths: list[list[NDArray[np.int32]]] = [[] for _ in jobs]
        self.n_rows = 0
        self._open = ExitStack()
        self._files: dict[str, IO[bytes]] = {}
        names = ["table.i4", "row.i8", *(["group.u2"] if grouped else [])]
        names += [f"{name}.{dtype}" for name, dtype in self.numbers.items()]
        names += [f"hash{i}.u8" for i in range(len(roles))] + [f"ids{i}.bin" for i in range(len(jobs))]
        for name in names:
            self._files[name] = self._open.enter_context((folder / name).open("wb"))

    def add(self, chunk: Chunk, tokens: Tokens) -> None:
        """Append rows."""
        self.n_rows += len(chunk.rows)
        self._write("table.i4", np.asarray(chunk.tables, np.int32))
        self._write("row.i8", np.asarray(chunk.rows, np.int64))
        if "group.u2" in self._files:
            self._write("group.u2", np.asarray(chunk.groups, np.uint16))
        for i, block in enumerate(chunk.hashes):
            self._files[f"hash{i}.u8"].write(block)
        for (name, dtype), values in zip(self.numbers.items(), chunk.numbers, strict=True):
            self._write(f"{name}.{dtype}", values)
        for i, (ids, lengths, _) in enumerate(tokens):
            self._write(f"ids{i}.bin", ids)
            self.lengths[i].append(lengths)

    def finish(
        self,
        tables: Sequence[str],
        groups: Sequence[str],
        frame: tuple[int | None, int] | None,
        report: dict[str, Any],
    ) -> None:
        """Write offsets, the report and last the description, without which the folder is no table."""
        fields = {}
        for i, (name, job) in enumerate(self.jobs.items()):
            lengths = self.field_lengths(i)
            offsets = np.zeros(self.n_rows + 1, np.int64)
            np.cumsum(lengths, out=offsets[1:])
            (self.folder / f"offsets{i}.i8").write_bytes(offsets.tobytes())
            fields[name] = {
                "role": job.role,
                "dtype": job.dtype,
                "pad_id": job.tokenization.pad_id,
                "fingerprint": job.tokenization.fingerprint,
                "tokens": int(offsets[-1]),
            }
        self.close()
        meta = {
            "format": FORMAT,
            "n_rows": self.n_rows,
            "roles": self.roles,
            "fields": fields,
            "numbers": self.numbers,
            "tables": list(tables),
            "groups": list(groups),
            "frame": frame and list(frame),
            "report": report,
        }
        text = json.dumps(report, indent=1, ensure_ascii=False)
        (self.folder / REPORT).write_text(text + "\n", encoding="utf-8")
        (self.folder / _META).write_text(json.dumps(meta | {"digest": _digest(meta)}), encoding="utf-8")

    def field_lengths(self, place: int) -> NDArray[np.int32]:
        """Tokens of every row so far, of the field at `place`."""
        return np.concatenate(self.lengths[place]) if self.n_rows else np.zeros(0, np.int32)

    def close(self) -> None:
        self._open.close()

    def _write(self, name: str, array: NDArray[Any]) -> None:
        # Not `tofile`, whose error on a full disk has no error number.
        self._files[name].write(np.ascontiguousarray(array).data)


class PackedTable:
    """A view of a table built for packing: its rows end with the separator and do not begin with [CLS].

    Row i is ``[first] + stream[i * w : (i + 1) * w] + [last]`` with ``w = length - 2``, or a plain piece of
    `length` tokens where the tokenizer has no pair of such tokens (decoders). What is left at the end of the
    stream is left out.

    Args:
        table: built with a frame.
        length: tokens of a row.

    Attributes:
        fields: the one field's `FieldView` (of the stream, not of these rows).
        frame: the ids of first and last, or None.
        width: tokens of the stream in one row.

    Raises:
        UserError: less text than one row.
    """

    def __init__(self, table: TokenTable, length: int) -> None:
        if len(table.fields) != 1:
            fix = "data.pack=null, or data=sentences"
            raise UserError(
                "only data with one text a row can be packed", key="data.pack", value=length, fix=fix
            )
        assert table.frame is not None, "the table was not built for packing"
        self.table = table
        self.length = length
        self.fields: dict[str, FieldView] = table.fields
        (self.field,) = table.fields
        first, last = table.frame
        self.frame = None if first is None or last is None else (first, last)
        self.width = length - 2 if self.frame else length
        self.n_rows = len(table.fields[self.field].ids) // self.width
        self.numbers: dict[str, NDArray[Any]] = {}
        self.report = table.report
        if self.n_rows == 0:
            fix = "more text, or a smaller data.pack"
            raise UserError(
                "there is less text than one packed sequence", key="data.pack", value=length, fix=fix
            )

    def views(self, row: int) -> Iterable[str]:
        return self.fields

    def lengths(self, field: str) -> NDArray[np.int32]:
        return np.full(self.n_rows, self.length, np.int32)

    @cached_property
    def longest(self) -> NDArray[np.int32]:
        return self.lengths(self.field)

    def describe(self, rows: Sequence[int], most: int = 8) -> str:
        """Where the text of packed rows came from: for each, the first row of the source that is in it."""
        offsets = self.table.fields[self.field].offsets
        starts = np.searchsorted(offsets, np.asarray(rows[:most]) * self.width, side="right") - 1
        more = f" and {len(rows) - most} more" if len(rows) > most else ""
        return self.table.describe(starts.tolist(), most) + more


Table = TokenTable | PackedTable
