"""Pairs of an anchor and its positive: questions and answers, titles and texts, paraphrases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import ClassVar

from embedlab.config.data import DataConfig
from embedlab.data.kinds import DataKind, RawRow
from embedlab.data.reader import Reader


class Pairs(DataKind):
    """``data=pairs``. A list of positives (FlagEmbedding's ``pos``) is a row for each of them."""

    name = "pairs"
    roles = ("anchor", "positive")
    usual: ClassVar = {
        "anchor": ("anchor", "query", "question", "sent0"),
        "positive": ("positive", "pos", "answer", "document", "sent1"),
    }

    def rows(
        self, readers: Sequence[Reader], roles: tuple[str, ...], config: DataConfig, dropped: Counter[str]
    ) -> Iterator[RawRow]:
        for table, row, values, group in super().rows(readers, roles, config, dropped):
            place = roles.index("positive") if "positive" in roles else 0
            several = values[place]
            if not isinstance(several, list):
                yield table, row, values, group
                continue
            if not several:
                dropped["no positive"] += 1
            for one in several:
                yield table, row, (*values[:place], one, *values[place + 1 :]), group
