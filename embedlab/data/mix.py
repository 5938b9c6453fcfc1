"""Several data sets in one run: each step has rows of one of them, the same one on all devices."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from embedlab.data.plan import BatchPlan, Rows, random_bits
from embedlab.data.table import FieldView, TokenTable

_STREAM = 0x6D6978  # of the order of the sets, apart from those of their rows


@dataclass(frozen=True)
class MixPlan:
    """Which set each step of an epoch is of, and which batch of it.

    Of set d an epoch has c_d batches: all of its B_d (``proportional``), the least B of any set
    (``round_robin``), or its share of the epoch's steps (``temperature``: p_d in proportion to
    (weight_d N_d)^(1 / T), by largest remainders). Batch k of epoch e is the set's own batch e c_d + k: its own epochs
    follow each other, whatever the length of a mixed one.

    Args:
        parts: plan of each set, with rows from 0 on.
        starts: number of the first row of each set.
        seed: of the order of the sets.
        sampling, temperature, weights: as above.
        steps: of an epoch of ``temperature``; None: of all sets' batches.
    """

    parts: Sequence[BatchPlan]
    starts: Sequence[int]
    seed: int = 0
    sampling: Literal["proportional", "round_robin", "temperature"] = "proportional"
    temperature: float = 1.0
    weights: Sequence[float] = ()
    steps: int | None = None

    def __len__(self) -> int:
        return sum(self.counts)

    @cached_property
    def counts(self) -> list[int]:
        """Batches of each set in an epoch."""
        sizes = [len(part) for part in self.parts]
        if self.sampling == "proportional":
            return sizes
        if self.sampling == "round_robin":
            return [min(sizes)] * len(sizes)
        weights = self.weights or [1.0] * len(sizes)
        rows = np.array([w * part.n_rows for w, part in zip(weights, self.parts, strict=True)], np.float64)
        wanted = rows ** (1 / self.temperature)
        return largest_remainder(wanted / wanted.sum(), self.steps or sum(sizes))

    @property
    def batch_size(self) -> int:
        return self.parts[0].batch_size

    @property
    def world(self) -> int:
        return self.parts[0].world

    @property
    def rank(self) -> int:
        return self.parts[0].rank

    @property
    def mega_batch(self) -> int:
        return self.parts[0].mega_batch

    @property
    def left(self) -> int:
        """Rows that fit into no batch of their set."""
        return sum(part.left for part in self.parts)

    def share(self, batch: Rows, rank: int | None = None) -> Rows:
        """A rank's rows of a batch of all devices; None: this rank's."""
        return self.parts[set_of(self.starts, int(batch[0]))].share(batch, rank)

    def sets(self, number: int) -> NDArray[np.int64]:
        """The set of each step of an epoch."""
        if self.sampling == "round_robin":
            return np.tile(np.arange(len(self.parts)), self.counts[0])
        each = np.repeat(np.arange(len(self.parts)), self.counts)
        return each[np.argsort(random_bits(self.seed ^ _STREAM, number, np.arange(len(each)), stream=0))]

    def whole_epoch(self, number: int) -> list[Rows]:
        """The row numbers of each batch of all devices in epoch `number`."""
        epochs: dict[tuple[int, int], list[Rows]] = {}
        done = [0] * len(self.parts)
        batches = []
        for place in self.sets(number).tolist():
            part = self.parts[place]
            own, batch = divmod(number * self.counts[place] + done[place], len(part))
            if (place, own) not in epochs:
                epochs[place, own] = part.whole_epoch(own)
            batches.append(epochs[place, own][batch] + self.starts[place])
            done[place] += 1
        return batches


def set_of(starts: Sequence[int], row: int) -> int:
    """The place of the set that a row is of, among those that begin at `starts`."""
    return int(np.searchsorted(starts, row, side="right")) - 1


def largest_remainder(shares: NDArray[np.float64], total: int) -> list[int]:
    """Whole numbers in these shares that add up to the total (Hamilton's method; ties to the first)."""
    exact = shares * total
    counts = np.floor(exact).astype(np.int64)
    left = total - int(counts.sum())
    counts[np.argsort(-(exact - counts), kind="stable")[:left]] += 1
    return [int(count) for count in counts]


class MixedTable:
    """The rows of several token tables, one table after the other.

    A field that a set has not is empty in its rows; a number that it has not is nan, or -1.

    Args:
        parts: table of each set.

    Attributes:
        names, starts: of each set, and the number of its first row.
        n_rows, fields, numbers, report: as of a `TokenTable`.
    """

    def __init__(self, parts: Mapping[str, TokenTable]) -> None:
        self.parts = dict(parts)
        self.names = list(parts)
        sizes = [part.n_rows for part in parts.values()]
        self.starts = [0, *np.cumsum(sizes).tolist()][:-1]
        self.n_rows = sum(sizes)
        self.report = _joined_report({name: part.report for name, part in parts.items()})

    @cached_property
    def fields(self) -> dict[str, FieldView]:
        tables = self.parts.values()
        return {
            name: _joined_field(name, tables) for name in dict.fromkeys(f for t in tables for f in t.fields)
        }

    @cached_property
    def numbers(self) -> dict[str, NDArray[Any]]:
        tables = self.parts.values()
        dtypes = {name: values.dtype for table in tables for name, values in table.numbers.items()}
        none = {name: np.nan if dtype.kind == "f" else -1 for name, dtype in dtypes.items()}
        return {
            name: np.concatenate([t.numbers.get(name, np.full(t.n_rows, none[name], dtype)) for t in tables])
            for name, dtype in dtypes.items()
        }

    def set_of(self, row: int) -> str:
        """The set that a row is of."""
        return self.names[set_of(self.starts, row)]

    def views(self, row: int) -> Iterable[str]:
        """The fields of the row's set."""
        return self.parts[self.set_of(row)].fields

    def lengths(self, field: str) -> NDArray[np.int32]:
        """Tokens of every row [n]; 0 in a set without the field."""
        return np.diff(self.fields[field].offsets).astype(np.int32)

    def describe(self, rows: Sequence[int], most: int = 8) -> str:
        """Where rows came from, as ``file:row, file:row, ...``."""
        first = self.set_of(rows[0])
        start = self.starts[self.names.index(first)]
        return self.parts[first].describe([row - start for row in rows], most)


def _joined_field(name: str, tables: Iterable[TokenTable]) -> FieldView:
    having = [table.fields[name] for table in tables if name in table.fields]
    lengths = [
        np.diff(table.fields[name].offsets) if name in table.fields else np.zeros(table.n_rows, np.int64)
        for table in tables
    ]
    hashes = [
        table.fields[name].hashes if name in table.fields else np.zeros(table.n_rows, np.uint64)
        for table in tables
    ]
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int64)
    return FieldView(
        np.concatenate([f.ids for f in having]), offsets, np.concatenate(hashes), having[0].pad_id
    )


def _decontaminated(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """What all sets were kept apart from, with the rows that were dropped of all."""
    found = [report["decontaminated"] for report in reports if "decontaminated" in report]
    return {"decontaminated": {**found[0], "rows": sum(one["rows"] for one in found)}} if found else {}


def _joined_report(reports: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    content = hashlib.blake2b(digest_size=16)
    for name, report in reports.items():
        content.update(f"{name} {report['content']}\n".encode())
    added = ("read", "rows", "duplicates")
    return {
        "source": ", ".join(f"{name}: {report['source']}" for name, report in reports.items()),
        "data": "mix",
        "content": content.hexdigest(),
        **{key: sum(report[key] for report in reports.values()) for key in added},
        **_decontaminated([*reports.values()]),
        "sets": dict(reports),
    }
