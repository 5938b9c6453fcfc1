"""The data report: what was read, what was left out and why, how long the rows are."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from embedlab.console import print_table, table
from embedlab.errors import printable

if TYPE_CHECKING:
    from rich.table import Table

    from embedlab.config.data import DataConfig
    from embedlab.data.rows import RowStream
    from embedlab.data.table import TableWriter
    from embedlab.data.tokenise import Chunk, FieldJob, Tokens

_EDGES = (0, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)
_BAR = 24


class Tally:
    """Counts for the report, while chunks go by."""

    def __init__(self, stream: RowStream, jobs: Mapping[str, FieldJob]) -> None:
        self.stream = stream
        self.jobs = jobs
        self.hashes: list[list[bytes]] = [[] for _ in stream.roles]
        self.cut = [0] * len(jobs)
        self.rows_of_table: Counter[int] = Counter()
        n_groups = len(stream.groups)
        self.rows_of_group = np.zeros(n_groups, np.int64)
        self.tokens_of_group = np.zeros((len(jobs), n_groups), np.int64)
        self.digest = hashlib.blake2b(digest_size=16)

    def add(self, chunk: Chunk, tokens: Tokens) -> None:
        for kept, block in zip(self.hashes, chunk.hashes, strict=True):
            kept.append(block)
            self.digest.update(block)
        for values in chunk.numbers:
            self.digest.update(values.tobytes())
        self.rows_of_table.update(chunk.tables)
        n_groups = len(self.rows_of_group)
        if n_groups:
            self.rows_of_group += np.bincount(chunk.groups, minlength=n_groups)
        for i, (_, lengths, cut) in enumerate(tokens):
            self.cut[i] += cut
            if n_groups:
                sums = np.bincount(chunk.groups, lengths, n_groups)
                self.tokens_of_group[i] += sums.astype(np.int64)

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
            **stream.decontaminated(),
            "duplicates": count_duplicates(hashes),
            "duplicate_texts": {
                role: count_duplicates([part]) for role, part in zip(stream.roles, hashes, strict=True)
            },
            "fields": {
                name: length_summary(writer.field_lengths(i), None if packed else self.cut[i])
                for i, name in enumerate(self.jobs)
            },
            "tables": [
                {"name": reader.name, "rows": self.rows_of_table[i]}
                for i, reader in enumerate(stream.readers)
            ],
            "groups": {name: self._group(name, place) for place, name in enumerate(stream.groups)},
            "languages": self._languages(),
            "seconds": round(seconds, 2),
        }

    def _group(self, name: str, place: int) -> dict[str, Any]:
        rows = int(self.rows_of_group[place])
        means = self.tokens_of_group[:, place] / max(1, rows)
        return {
            "rows": rows,
            "dropped": {why: n for (group, why), n in self.stream.dropped_by_group.items() if group == name},
            "mean_tokens": {
                field: round(float(mean), 2) for field, mean in zip(self.jobs, means, strict=True)
            },
        }

    def _languages(self) -> dict[str, Any]:
        """Texts and tokens of each language, whichever side it is on; most texts first."""
        found: dict[str, dict[str, Any]] = {}
        first_field = {role: i for i, role in reversed([*enumerate(j.role for j in self.jobs.values())])}
        for place, languages in enumerate(self.stream.languages):
            for role, language in zip(("source", "target"), languages, strict=True):
                if role in first_field:
                    counts = found.setdefault(language, {"texts": 0, "pairs": 0, "tokens": 0})
                    counts["texts"] += int(self.rows_of_group[place])
                    counts["pairs"] += 1
                    counts["tokens"] += int(self.tokens_of_group[first_field[role], place])
        for counts in found.values():
            counts["mean_tokens"] = round(counts["tokens"] / max(1, counts["texts"]), 2)
        return dict(sorted(found.items(), key=lambda item: -item[1]["texts"]))


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


def report_tables(report: Mapping[str, Any]) -> dict[str, Table]:
    """The report as tables by their titles: rows, lengths of each field, language pairs and languages where there are
    any."""
    found = {
        f"Data: {report['source']}": _rows(report),
        "Tokens a row": _lengths(report["fields"]),
        "Language pairs": _groups(report["groups"]) if report["groups"] else None,
        "Languages": _by_language(report["languages"]) if report.get("languages") else None,
    }
    return {printable(title): one for title, one in found.items() if one is not None}


def print_report(report: Mapping[str, Any]) -> None:
    """Print the report to standard error."""
    for title, one in report_tables(report).items():
        print_table(one, title, file=sys.stderr)


def _rows(report: Mapping[str, Any]) -> Table:
    read, kept = max(1, report["read"]), report["rows"]
    counts = [
        *((f"  dropped: {reason}", n, n / read) for reason, n in report["dropped"].items()),
        ("kept", kept, kept / read),
        ("  of them repeats of an earlier row", report["duplicates"], report["duplicates"] / kept),
    ]
    rows = [
        ("read", f"{report['read']:,}", ""),
        *((what, f"{n:,}", f"{part:.1%}") for what, n, part in counts),
    ]
    return table(("", "rows", "share"), rows)


def _lengths(fields: Mapping[str, Any]) -> Table:
    histograms = [field["histogram"] for field in fields.values()]
    edges = max((h["from"] for h in histograms), key=len)
    rows = []
    for i, edge in enumerate(edges):
        shares = [h["rows"][i] / max(1, sum(h["rows"])) if i < len(h["rows"]) else 0.0 for h in histograms]
        until = f"{edges[i + 1] - 1}" if i + 1 < len(edges) else "…"
        rows.append((f"{edge} – {until}", *(f"{share:6.1%} {'▇' * round(_BAR * share)}" for share in shares)))
    out = table(("tokens", *fields), rows, numbers="left")
    out.add_section()
    for key in ("mean", "median", "p95", "longest"):
        out.add_row(key, *(f"{field[key]:6,}" for field in fields.values()))
    if all(field["truncated"] is not None for field in fields.values()):
        out.add_row("truncated", *(f"{field['truncated']:6.1%}" for field in fields.values()))
    return out


def _by_language(languages: Mapping[str, Any]) -> Table:
    total = max(1, sum(values["texts"] for values in languages.values()))
    rows = [
        (language, f"{v['texts']:,}", f"{v['texts'] / total:.1%}", f"{v['pairs']}", f"{v['tokens']:,}",
         f"{v['mean_tokens']:.1f}")
        for language, v in languages.items()
    ]  # fmt: skip
    return table(("language", "texts", "share", "in pairs", "tokens", "a text"), rows)


def _groups(groups: Mapping[str, Any]) -> Table:
    fields = next(iter(groups.values()))["mean_tokens"]
    rows = [
        (
            pair,
            f"{v['rows']:,}",
            f"{sum(v['dropped'].values()):,}",
            *(f"{v['mean_tokens'][f]:.1f}" for f in fields),
        )
        for pair, v in groups.items()
    ]
    return table(("pair", "rows", "dropped", *(f"{name} tokens" for name in fields)), rows)
