"""Rows of texts from any source: read by kind, cleaned, capped and counted, one at a time."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from embedlab.config.data import DataConfig
from embedlab.console import quiet
from embedlab.data.contamination.overlap import Overlap
from embedlab.data.kinds import DataKind, check_unread, data_kind, in_set
from embedlab.data.plan import BatchPlan, tell_dropped
from embedlab.data.reader import Reader
from embedlab.data.sources import check_source, open_source
from embedlab.encoders.windows import windows
from embedlab.errors import UserError

_CHUNK = 2048
_LOOKED_AT = 20_000  # rows: some 50 ms
_IN_SETS = "in evaluation sets of "
_MOST = {int: 2.0**63, float: 2.0**128 - 2.0**103}
"""What numbers of batches (int64, fp32) stay below: what is larger would be infinite."""
Row = tuple[int, int, tuple[Any, ...], int]
"""Number of the table, number of the row in it, the texts and after them the numbers of the kind of data, number of the
group (the language pair, or 0)."""


@dataclass
class RowStream:
    """The rows of a source for some of its roles, cleaned.

    Attributes:
        kind: of the data.
        readers: the tables that are read.
        groups: names of the groups (language pairs) that rows can be in; empty where there are none.
        languages: the languages of each group, that of the source and that of the target.
        dropped: reason -> rows left out, so far.
        dropped_by_group: the same by group and reason.
        overlap: rows with a text of these evaluation sets are left out.
    """

    config: DataConfig
    kind: DataKind
    roles: tuple[str, ...]
    readers: Sequence[Reader]
    groups: list[str] = field(default_factory=list)
    languages: list[tuple[str, str]] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    dropped_by_group: Counter[tuple[str, str]] = field(default_factory=Counter)
    overlap: Overlap | None = None

    def __iter__(self) -> Iterator[Row]:
        rows = self.clean()
        if self.overlap is not None:
            rows = self._apart(rows, self.overlap)
        if self.config.duplicates == "drop":
            rows = self._unique(rows)
        if self.config.pair_limit is not None:
            rows = self._capped(rows, self.config.pair_limit)
        if self.config.limit is not None:
            rows = islice(rows, self.config.limit)
        return rows

    def clean(self) -> Iterator[Row]:
        """Every row with text, whatever else is asked of it."""
        rows = self.kind.rows(self.readers, self.roles, self.config, self.dropped)
        shortest, longest = max(1, self.config.min_chars), self.config.max_chars
        n_texts = len(self.roles)
        for table, row, values, group in rows:
            texts: list[Any] = []
            reason = ""
            for place, value in enumerate(values[:n_texts]):
                if value is None:
                    reason = "empty"
                    break
                if not isinstance(value, str):
                    told = f"the {self.roles[place]} is {value!r}, not text"
                    raise self._error(table, row, told, fix="a column of texts, or quotes around it")
                size = len(value)
                if size > longest:
                    if self.config.overlong == "error":
                        raise self._overlong(table, row, size)
                    if self.config.overlong == "drop":
                        reason = "over max_chars"
                        break
                    value = value[:longest]
                if not value or value.isspace():
                    reason = "empty"
                    break
                if size < shortest:
                    reason = "under min_chars"
                    break
                if "\0" in value:
                    told = f"a NUL character in the {self.roles[place]}"
                    raise self._error(table, row, told, fix="take it out")
                texts.append(value)
            numbers = values[n_texts:]
            if not reason and None in numbers:
                reason = "without a number"
            if not reason:
                columns = zip(self.kind.numbers_of(self.config).items(), numbers, strict=True)
                texts += [self._number(table, row, *column) for column in columns]
            if reason:
                self._drop(reason, group)
            else:
                yield table, row, tuple(texts), group

    def decontaminated(self) -> dict[str, Any]:
        """For a report: what evaluation texts the rows were kept apart from, and how many were dropped."""
        if self.overlap is None:
            return {}
        rows = sum(count for reason, count in self.dropped.items() if reason.startswith(_IN_SETS))
        return {"decontaminated": {**self.overlap.facts(), "rows": rows}}

    def _apart(self, rows: Iterable[Row], overlap: Overlap) -> Iterator[Row]:
        count = len(self.roles)
        for chunk in windows(rows, _CHUNK, text=lambda row: max(row[2][:count], key=len)):
            found = overlap.find([text for row in chunk for text in row[2][:count]])
            for place, row in enumerate(chunk):
                hits = [hit for some in found[place * count : (place + 1) * count] for hit in some]
                if hits:
                    self._drop(f"{_IN_SETS}{overlap.sets[hits[0].held].suite}", row[3])
                else:
                    yield row

    def _number(self, table: int, row: int, column: tuple[str, type], value: Any) -> float | int:
        name, as_type = column
        try:
            number = as_type(value)
            if number != float(value) or not abs(number) < _MOST[as_type]:
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            what = "a whole number" if as_type is int else "a number"
            told = f"the {name} is {value!r}, not {what}"
            raise self._error(table, row, told, fix="a number in each row, or take the row out") from None
        return number  # type: ignore[no-any-return]

    def _unique(self, rows: Iterable[Row]) -> Iterator[Row]:
        seen: set[int] = (
            set()
        )  # Python's 64-bit hash of the texts: one process, so its random seed does not matter
        for row in rows:
            key = hash(row[2])
            if key in seen:
                self._drop("duplicate", row[3])
            else:
                seen.add(key)
                yield row

    def _capped(self, rows: Iterable[Row], limit: int) -> Iterator[Row]:
        """At most `limit` rows a group: the first ones, or a seeded sample in the order of the source."""
        if self.config.pair_sample == "first":
            taken: Counter[int] = Counter()
            for row in rows:
                taken[row[3]] += 1
                if taken[row[3]] <= limit:
                    yield row
                else:
                    self._drop("over pair_limit", row[3])
            return
        kept: dict[int, list[Row]] = {}
        met: Counter[int] = Counter()
        rng = random.Random(self.config.pair_seed)
        for row in rows:  # reservoir sampling, "Algorithm R" (Vitter 1985)
            group = kept.setdefault(row[3], [])
            met[row[3]] += 1
            if len(group) < limit:
                group.append(row)
            else:
                self._drop("over pair_limit", row[3])
                if (place := rng.randrange(met[row[3]])) < limit:
                    group[place] = row
        yield from sorted(
            (row for group in kept.values() for row in group), key=lambda row: (row[0], row[1], row[3])
        )

    def _drop(self, reason: str, group: int) -> None:
        self.dropped[reason] += 1
        if self.groups:
            self.dropped_by_group[self.groups[group], reason] += 1

    def _overlong(self, table: int, row: int, size: int) -> UserError:
        return self._error(
            table,
            row,
            f"a text of {size:,} characters, and the limit is {self.config.max_chars:,}",
            key="data.max_chars",
            value=self.config.max_chars,
            fix="data.overlong=drop or data.overlong=truncate, or raise the limit",
        )

    def _error(self, table: int, row: int, message: str, fix: str, **more: object) -> UserError:
        return self.readers[table].error(message, row, fix=fix, **more)


def read_rows(
    config: DataConfig,
    roles: Iterable[str] | None = None,
    readers: Sequence[Reader] | None = None,
    overlap: Overlap | None = None,
) -> RowStream:
    """The rows of a configuration, read when they are iterated.

    Args:
        config: what to read.
        roles: the texts of a row, in this order (None: all that this kind of data has).
        readers: the opened source, where the caller has it.
        overlap: evaluation sets of which no row may hold a text.

    Raises:
        UserError: bad input, at once where the headers show it, else when the row is reached.
    """
    kind = data_kind(config.name)
    roles = tuple(roles) if roles is not None else kind.roles_of(config)
    readers = readers or open_source(config)
    groups = kind.groups(readers, roles, config)
    check_unread(kind, readers, config)
    return RowStream(config, kind, roles, readers, list(groups), list(groups.values()), overlap=overlap)


def check_first_rows(config: DataConfig, devices: int = 0) -> None:
    """Read the first rows of files, without torch: a bad one among them, or that these are too few, need not wait until
    the encoder is made.

    Args:
        config: of the run's data.
        devices: at least so many train on it; 0: none does.

    Raises:
        UserError: as `read_rows`; all rows are less than one batch.
    """
    for name, one in config.by_name.items():
        with in_set(name):
            rows, dropped = _first_rows(one)
        if not devices or not rows or one.pack is not None:
            continue
        try:
            with in_set(name, rows=True):
                BatchPlan(rows, one.batch_size, world=devices, drop_last=one.drop_last)
        except UserError as error:
            tell_dropped(error, rows + sum(dropped.values()), dropped)
            raise


def _first_rows(config: DataConfig) -> tuple[int | None, Mapping[str, int]]:
    """How many rows there are at most, where this look sees them all; and how many were left out, by reason."""
    if not config.files:
        check_source(config)
        return None, {}
    most = min(_LOOKED_AT, config.limit or _LOOKED_AT)
    with quiet("embedlab.data.readers"):  # what it warns of, it says when the text is read in earnest
        stream = read_rows(config)
        rows = sum(1 for _ in islice(stream.clean(), most))
    return rows if rows < _LOOKED_AT else None, stream.dropped


def iter_texts(config: DataConfig, role: str | None = None) -> Iterator[str]:
    """Every text of a configuration (of one role, or of all in turn), as for learning a tokenizer."""
    if config.mix:
        for one in config.sets.values():
            yield from iter_texts(one.config, role)
        return
    stream = read_rows(config, None if role is None else (role,))
    for _, _, values, _ in stream:
        yield from values[: len(stream.roles)]
