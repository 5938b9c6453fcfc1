"""Translation pairs, from tables with a named column a language."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from embedlab.config.data import DataConfig
from embedlab.data.kinds import DataKind, RawRow
from embedlab.data.reader import Reader
from embedlab.errors import UserError, one_of

_PIVOTS = ("en", "eng")


class Parallel(DataKind):
    """``data=parallel``. Column names are those of `sentence-transformers/parallel-sentences-*` too."""

    name = "parallel"
    roles = ("source", "target")
    usual: ClassVar = {"source": ("source", "english"), "target": ("target", "non_english")}
    packages = ("emoji", "emoji-train")
    keys: ClassVar = dict.fromkeys(("languages", "pairs", "pivot", "pair_limit"), "languages")

    def reads(self, reader: Reader, config: DataConfig) -> set[str]:
        return {*config.chosen.values(), *(config.languages or ())}

    def groups(
        self, readers: Sequence[Reader], roles: tuple[str, ...], config: DataConfig
    ) -> dict[str, tuple[str, str]]:
        return {pair.name: pair.languages for pair in self.pairs(readers, config)}

    def rows(
        self, readers: Sequence[Reader], roles: tuple[str, ...], config: DataConfig, dropped: Counter[str]
    ) -> Iterator[RawRow]:
        """The texts of `roles` of every pair of every row; the group is the pair's place among the `groups`."""
        pairs = self.pairs(readers, config)
        groups = list(dict.fromkeys(pair.name for pair in pairs))
        for table, reader in enumerate(readers):
            here = [pair for pair in pairs if pair.table == table]
            columns = list(dict.fromkeys(c for pair in here for c in (pair.source, pair.target)))
            places = [
                (tuple(columns.index(getattr(pair, role)) for role in roles), groups.index(pair.name))
                for pair in here
            ]
            for row, values in reader.rows(columns) if here else ():
                for place, group in places:
                    yield table, row, tuple([values[p] for p in place]), group

    def pairs(self, readers: Sequence[Reader], config: DataConfig) -> list[Pair]:
        """The language pairs to read, table by table.

        A table with columns for the roles source and target is one pair. Any other has a column a language, and
        gives the pairs that the configuration names, or its pivot with each other language.

        Raises:
            UserError: a language or a pair that no table has; no pivot where one is needed.
        """
        pairs: list[Pair] = []
        by_language: dict[int, dict[str, str]] = {}
        for table, reader in enumerate(readers):
            if config.chosen or self.has_columns(reader, self.roles, config):
                columns = self.find_columns(reader, self.roles, config)
                on_hub = reader.name.startswith("hub:") and " " in reader.name
                # Of the hub the configuration, such as en-de.
                name = reader.name.split(" ")[-1] if on_hub else "-".join(columns)
                pairs.append(Pair(table, name, *columns))
            else:
                by_language[table] = _languages(reader)
        pairs += [
            Pair(table, f"{source}-{target}", columns[source], columns[target])
            for source, target in (_wanted(by_language, config) if by_language else ())
            for table, columns in by_language.items()
            if source in columns and target in columns
        ]
        if not pairs:
            told, fix = "no table has two of the languages", "null, or names of columns"
            raise readers[0].error(told, key="data.languages", value=config.languages, fix=fix)
        return sorted(pairs, key=lambda pair: pair.table)


_ROLE_COLUMNS = frozenset(name for names in Parallel.usual.values() for name in names)


@dataclass(frozen=True)
class Pair:
    """A language pair in one table: its name, such as ``en-de``, the two columns, and the languages."""

    table: int
    name: str
    source: str
    target: str

    @property
    def languages(self) -> tuple[str, str]:
        """Of source and target: the columns' names, or where these name the roles, what the pair's name says."""
        columns = self.source.rsplit(".", 1)[-1], self.target.rsplit(".", 1)[-1]
        said = tuple(self.name.split("-"))
        return said if len(said) == 2 and set(columns) & _ROLE_COLUMNS else columns


def _languages(reader: Reader) -> dict[str, str]:
    """Language -> column. In nested tables (``translation.de``) the last part is the language."""
    if reader.columns is None:
        raise reader.error(
            "a file without named columns; translations need a column a language",
            fix="a .tsv file with a header such as en, de",
        )
    return {column.rsplit(".", 1)[-1]: column for column in reader.columns}


def _wanted(tables: dict[int, dict[str, str]], config: DataConfig) -> list[tuple[str, str]]:
    known = list(dict.fromkeys(language for columns in tables.values() for language in columns))
    if config.pairs:
        return [_split(pair, known, tables) for pair in config.pairs]
    languages = config.languages or known
    for language in [*languages, *([config.pivot] if config.pivot else [])]:
        if language not in known:
            key = "data.pivot" if language == config.pivot else "data.languages"
            raise UserError("unknown language", key=key, value=language, fix=one_of(language, known))
    pivot = config.pivot or _pivot(tables, languages)
    return [(pivot, language) for language in languages if language != pivot]


def _pivot(tables: dict[int, dict[str, str]], languages: list[str]) -> str:
    shared = [lang for lang in languages if all(lang in columns for columns in tables.values())]
    used = [lang for lang in languages if lang in _PIVOTS]
    for language in (*(lang for lang in _PIVOTS if lang in shared), *used, *shared):
        return language
    raise UserError(
        "no language is in every table, so that the pairs are not clear",
        key="data.pivot",
        fix=f"data.pivot=LANGUAGE, or data.pairs=[A-B, ...], of {', '.join(languages)}",
    )


def _split(pair: str, known: list[str], tables: dict[int, dict[str, str]]) -> tuple[str, str]:
    """``en-zh-CN`` -> (en, zh-CN): names of languages may have hyphens of their own."""
    parts = pair.split("-")
    cuts = [("-".join(parts[:i]), "-".join(parts[i:])) for i in range(1, len(parts))]
    for source, target in cuts:
        if source in known and target in known and source != target:
            if any(source in columns and target in columns for columns in tables.values()):
                return source, target
            fix = "a file with a column for each"
            raise UserError("no table has both languages", key="data.pairs", value=pair, fix=fix)
    raise UserError("unknown language pair", key="data.pairs", value=pair, fix=f"A-B of {', '.join(known)}")
