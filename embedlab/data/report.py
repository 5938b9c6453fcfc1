"""The data report (what was read, what was left out and why, how long the rows are), and the bar while it is read."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from embedlab.errors import printable

if TYPE_CHECKING:
    from rich.table import Table

    from embedlab.config.data import DataConfig
    from embedlab.data.readers import Reader
    from embedlab.data.rows import RowStream
    from embedlab.data.table import TableWriter
    from embedlab.data.tokenise import Chunk, Tokens

_EDGES = (0, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)
_BAR = 24


class Tally:
    """Counts for the report, while chunks go by."""

    def __init__(
        self, stream: RowStream, fields: list[str], roles: tuple[str, ...], field_roles: list[str]
    ) -> None:
        self.stream = stream
        self.fields = fields
        self.field_roles = field_roles
        self.roles = roles
        self.hashes: list[list[bytes]] = [[] for _ in roles]
        self.cut = [0] * len(fields)
        self.rows_of_table: Counter[int] = Counter()
        self.rows_of_group: Counter[int] = Counter()
        self.tokens_of_group: list[Counter[int]] = [Counter() for _ in fields]
        self.digest = hashlib.blake2b(digest_size=16)

    def add(self, chunk: Chunk, tokens: Tokens) -> None:
        for kept, block in zip(self.hashes, chunk.hashes, strict=True):
            kept.append(block)
            self.digest.update(block)
        for values in chunk.numbers:
            self.digest.update(values.tobytes())
        self.rows_of_table.update(chunk.tables)
        for i, (_, lengths, cut) in enumerate(tokens):
            self.cut[i] += cut
            if self.stream.groups:
                sums = np.bincount(chunk.groups, lengths)
                self.tokens_of_group[i].update({g: int(n) for g, n in enumerate(sums) if n})
        if self.stream.groups:
            self.rows_of_group.update(chunk.groups)

    def report(self, config: DataConfig, writer: TableWriter, seconds: float) -> dict[str, Any]:
        """The report; `content` names the kept texts in their order, whatever they are tokenised with."""
        stream = self.stream
        hashes = [np.frombuffer(b"".join(blocks), np.uint64) for blocks in self.hashes]
        packed = config.pack is not None
        return {
            "source": config.source,
            "data": config.name,
            "content": self.digest.hexdigest(),
            "read": writer.n_rows + stream.dropped.total(),
            "rows": writer.n_rows,
            "dropped": dict(stream.dropped),
            "duplicates": count_duplicates(hashes),
            "duplicate_texts": {
                role: count_duplicates([part]) for role, part in zip(self.roles, hashes, strict=True)
            },
            "fields": {
                name: length_summary(writer.field_lengths(i), None if packed else self.cut[i])
                for i, name in enumerate(self.fields)
            },
            "tables": [
                {"name": reader.name, "rows": self.rows_of_table[i]}
                for i, reader in enumerate(stream.source.readers)
            ],
            "groups": {name: self._group(place) for place, name in enumerate(stream.groups)},
            "languages": self._languages(),
            "seconds": round(seconds, 2),
        }

    def _group(self, place: int) -> dict[str, Any]:
        rows = self.rows_of_group[place]
        name = self.stream.groups[place]
        return {
            "rows": rows,
            "dropped": {
                reason: count
                for (group, reason), count in self.stream.dropped_by_group.items()
                if group == name
            },
            "mean_tokens": {
                field: round(self.tokens_of_group[i][place] / max(1, rows), 2)
                for i, field in enumerate(self.fields)
            },
        }

    def _languages(self) -> dict[str, Any]:
        """Texts and tokens of each language, whichever side it is on; most texts first."""
        texts: Counter[str] = Counter()
        tokens: Counter[str] = Counter()
        pairs: Counter[str] = Counter()
        for place, languages in enumerate(self.stream.languages):
            for role, language in zip(("source", "target"), languages, strict=True):
                if role not in self.roles:
                    continue
                texts[language] += self.rows_of_group[place]
                pairs[language] += 1
                field = self.field_roles.index(role)
                tokens[language] += self.tokens_of_group[field][place]
        return {
            language: {
                "texts": n,
                "pairs": pairs[language],
                "tokens": tokens[language],
                "mean_tokens": round(tokens[language] / max(1, n), 2),
            }
            for language, n in texts.most_common()
        }


def count_duplicates(hashes: Sequence[NDArray[np.uint64]]) -> int:
    """Rows whose texts all equal those of an earlier row, by their 64-bit hashes (one array a role)."""
    key = np.zeros_like(hashes[0])
    for part in hashes:
        key = (
            key * np.uint64(0x9E3779B97F4A7C15)
        ) ^ part  # odd multiplier, so that the order of the roles counts
    key.sort()  # quicker than np.unique, which hashes
    return int(np.count_nonzero(key[1:] == key[:-1]))


def length_summary(lengths: NDArray[np.int32], cut: int | None) -> dict[str, Any]:
    """Tokens a row: mean, quantiles and histogram.

    Args:
        lengths: of every row [n].
        cut: how many rows were truncated (None: rows are not).
    """
    longest = int(lengths.max())
    edges = [edge for edge in _EDGES if edge <= longest]
    counts, _ = np.histogram(lengths, bins=[*edges, longest + 1])
    return {
        "tokens": int(lengths.sum()),
        "mean": round(float(lengths.mean()), 2),
        "median": int(np.median(lengths)),
        "p95": int(np.quantile(lengths, 0.95)),
        "longest": longest,
        "truncated": None if cut is None else round(cut / len(lengths), 4),
        "histogram": {"from": edges, "rows": counts.tolist()},
    }


def report_tables(report: Mapping[str, Any]) -> list[Table]:
    """The report as Rich tables: rows, lengths of each field, language pairs and languages where there are any."""
    return [
        _rows(report),
        _lengths(report["fields"]),
        *([_groups(report["groups"])] if report["groups"] else []),
        *([_by_language(report["languages"])] if report.get("languages") else []),
    ]


def print_report(report: Mapping[str, Any]) -> None:
    """Print the report to standard error."""
    from rich.console import Console

    console = Console(stderr=True)
    console.print(f"Data: {printable(str(report['source']))}", highlight=False, markup=False, soft_wrap=True)
    for table in report_tables(report):
        console.print(table)


def _table(title: str | None, columns: Sequence[str], numbers: Literal["left", "right"] = "right") -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 else numbers)
    return table


def _rows(report: Mapping[str, Any]) -> Table:
    table = _table(None, ("", "rows", "share"))
    read = max(1, report["read"])
    table.add_row("read", f"{report['read']:,}", "")
    for reason, count in report["dropped"].items():
        table.add_row(f"  dropped: {reason}", f"{count:,}", f"{count / read:.1%}")
    table.add_row("kept", f"{report['rows']:,}", f"{report['rows'] / read:.1%}")
    duplicates = report["duplicates"]
    table.add_row(
        "  of them repeats of an earlier row", f"{duplicates:,}", f"{duplicates / report['rows']:.1%}"
    )
    return table


def _lengths(fields: Mapping[str, Any]) -> Table:
    names = list(fields)
    table = _table("Tokens a row", ("tokens", *names), numbers="left")
    edges = max((fields[name]["histogram"]["from"] for name in names), key=len)
    for i, edge in enumerate(edges):
        cells = []
        for name in names:
            counts = fields[name]["histogram"]["rows"]
            share = counts[i] / max(1, sum(counts)) if i < len(counts) else 0.0
            cells.append(f"{share:6.1%} {'▇' * round(_BAR * share)}")
        until = f"{edges[i + 1] - 1}" if i + 1 < len(edges) else "…"
        table.add_row(f"{edge} – {until}", *cells)
    table.add_section()
    for key in ("mean", "median", "p95", "longest"):
        table.add_row(key, *(f"{fields[name][key]:6,}" for name in names))
    if all(fields[name]["truncated"] is not None for name in names):
        table.add_row("truncated", *(f"{fields[name]['truncated']:6.1%}" for name in names))
    return table


def _by_language(languages: Mapping[str, Any]) -> Table:
    from rich.markup import escape

    table = _table("Languages", ("language", "texts", "share", "in pairs", "tokens", "a text"))
    total = max(1, sum(values["texts"] for values in languages.values()))
    for language, values in languages.items():
        numbers = (f"{values['texts']:,}", f"{values['texts'] / total:.1%}", f"{values['pairs']}")
        table.add_row(
            escape(printable(language)), *numbers, f"{values['tokens']:,}", f"{values['mean_tokens']:.1f}"
        )
    return table


def _groups(groups: Mapping[str, Any]) -> Table:
    from rich.markup import escape

    fields = list(next(iter(groups.values()))["mean_tokens"])
    table = _table("Language pairs", ("pair", "rows", "dropped", *(f"{name} tokens" for name in fields)))
    for pair, values in groups.items():
        means = (f"{values['mean_tokens'][name]:.1f}" for name in fields)
        table.add_row(
            escape(printable(pair)), f"{values['rows']:,}", f"{sum(values['dropped'].values()):,}", *means
        )
    return table


@contextmanager
def progress_bar(readers: Sequence[Reader], show: bool) -> Iterator[Callable[[int], None]]:
    """A function that takes the number of rows done and moves a progress bar, on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not (show and console.is_terminal):
        yield lambda rows: None
        return
    columns = [
        TextColumn("tokenising"),
        BarColumn(),
        TextColumn("{task.fields[rows]:,} rows"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    ]
    size = sum(reader.size for reader in readers)
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=size or None, rows=0)

        def advance(rows: int) -> None:
            read = sum(reader.position for reader in readers)
            bar.update(task, completed=read, rows=rows)

        yield advance
