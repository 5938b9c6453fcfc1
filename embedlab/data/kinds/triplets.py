"""An anchor, its positive and n hard negatives, with a teacher's scores of them where there are any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from embedlab.config.data import DataConfig
from embedlab.data.kinds import DataKind, RawRow
from embedlab.data.kinds.pairs import Pairs
from embedlab.data.reader import Reader

_NEGATIVE, _SCORE = "negative_", "score_"


class Triplets(DataKind):
    """``data=triplets``: ``negative_1`` to ``negative_n`` are columns of their own, or one list.

    FlagEmbedding's lines (query, pos, neg, pos_scores, neg_scores) are a row for each positive.
    """

    name = "triplets"
    roles = ("anchor", "positive", "negative_1")
    usual: ClassVar = {
        **Pairs.usual,
        "negative_1": ("negative_1", "negative", "hard_neg"),
        "negatives": ("negatives", "neg"),
        "scores": ("scores",),
        "positive_scores": ("pos_scores",),
        "negative_scores": ("neg_scores",),
    }
    keys: ClassVar = {"negatives": "hard negatives in such a number", "scores": "scores of a teacher"}
    has_negatives = True

    def roles_of(self, config: DataConfig) -> tuple[str, ...]:
        return *self.roles[:2], *(f"{_NEGATIVE}{k}" for k in range(1, _number(config) + 1))

    def numbers_of(self, config: DataConfig) -> Mapping[str, type]:
        return {f"{_SCORE}{k}": float for k in range(_number(config) + 1)} if config.scores else {}

    def prompts_of(self, config: DataConfig) -> dict[str, str]:
        """As of every kind; the prompt of ``negatives`` is that of each of them."""
        given = dict(config.prompts or {})
        shared = given.pop("negatives", None)
        each = dict.fromkeys(self.roles_of(config)[2:], shared)
        return super().prompts_of(replace(config, prompts={**each, **given}))

    def usual_names(self, role: str) -> tuple[str, ...]:
        named = role.startswith((_NEGATIVE, _SCORE)) and role.rpartition("_")[2].isdecimal()
        return super().usual_names(role) or ((role,) if named else ())

    def reads(self, reader: Reader, config: DataConfig) -> set[str]:
        return {column for columns in self._columns(reader, config).values() for column in columns}

    def groups(
        self, readers: Sequence[Reader], roles: tuple[str, ...], config: DataConfig
    ) -> dict[str, tuple[str, str]]:
        for reader in readers:
            self._columns(reader, config)
        return {}

    def rows(
        self, readers: Sequence[Reader], roles: tuple[str, ...], config: DataConfig, dropped: Counter[str]
    ) -> Iterator[RawRow]:
        """Texts of `roles`, then scores, of every positive of every row with enough negatives."""
        wanted = (*roles, *self.numbers_of(config))
        for table, reader in enumerate(readers):
            parts = self._columns(reader, config)
            columns = [column for names in parts.values() for column in names]
            for row, values in reader.rows(columns):
                cells = iter(values)
                found = {part: [next(cells) for _ in names] for part, names in parts.items()}
                for texts in self._spread(reader, row, found, config, dropped):
                    yield table, row, tuple([texts[name] for name in wanted]), 0

    def _columns(self, reader: Reader, config: DataConfig) -> dict[str, list[str]]:
        """Part of a row -> its columns.

        Raises:
            UserError: a part without a column, or fewer negatives than are asked for.
        """
        n = _number(config)
        parts = {role: self.find_columns(reader, (role,), config) for role in self.roles[:2]}
        each = [self._column(reader, f"{_NEGATIVE}{k}", config) for k in range(1, n + 1)]
        listed = self._column(reader, "negatives", config)
        if listed is not None and (each[0] is None or "negatives" in config.chosen):
            parts["negatives"] = [listed]
        elif None in each and each[0] is not None:
            raise reader.error(
                f"the table has {each.index(None)}", key="data.negatives", value=n,
                fix=f"data.negatives={each.index(None)}, or data.columns.{_NEGATIVE}{each.index(None) + 1}=NAME",
            )  # fmt: skip
        else:
            negatives = tuple(f"{_NEGATIVE}{k}" for k in range(1, n + 1))
            parts["negatives"] = self.find_columns(reader, negatives, config)
        return parts | (self._score_columns(reader, config) if config.scores else {})

    def _score_columns(self, reader: Reader, config: DataConfig) -> dict[str, list[str]]:
        apart = "positive_scores", "negative_scores"
        if self.has_columns(reader, apart, config):
            return {part: self.find_columns(reader, (part,), config) for part in apart}
        each = tuple(self.numbers_of(config))
        wanted = each if self.has_columns(reader, each, config) else ("scores",)
        return {"scores": self.find_columns(reader, wanted, config)}

    def _spread(
        self, reader: Reader, row: int, found: dict[str, list[Any]], config: DataConfig, dropped: Counter[str]
    ) -> Iterator[dict[str, Any]]:
        """The rows that a line of the table makes: value by role and number."""
        n, anchor = _number(config), found["anchor"][0]
        positives, negatives = map(_flat, (found["positive"], found["negatives"]))
        if len(negatives) < n or None in negatives[:n]:
            dropped[f"fewer than {n} negatives"] += 1
            return
        if not positives:
            dropped["no positive"] += 1
        for place, positive in enumerate(positives):
            made = {"anchor": anchor, "positive": positive}
            made |= {f"{_NEGATIVE}{k}": text for k, text in enumerate(negatives[:n], 1)}
            if config.scores:
                made |= self._scores(reader, row, found, place, n)
            yield made

    def _scores(
        self, reader: Reader, row: int, found: dict[str, list[Any]], place: int, n: int
    ) -> dict[str, Any]:
        """Those of the positive at `place` and of the first n negatives: each stands at the place of its text."""
        if "scores" in found:
            scores = _flat(found["scores"])
            positive, negative = scores[:1], scores[1:]
        else:
            positive, negative = _flat(found["positive_scores"]), _flat(found["negative_scores"])
        count = len(_flat(found["positive"]))
        if len(positive) != count or len(negative) < n:
            texts = "a positive" if count == 1 else f"{count} positives"
            raise reader.error(
                f"{len(positive) + len(negative)} scores of {texts} and {n} negatives",
                row,
                key="data.scores",
                fix="data.scores=null",
            )
        return {f"{_SCORE}{k}": score for k, score in enumerate([positive[place], *negative[:n]])}


def _number(config: DataConfig) -> int:
    return config.negatives or 1


def _flat(cells: list[Any]) -> list[Any]:
    """Values of columns of their own, or of the one list."""
    if len(cells) > 1:
        return cells
    return cells[0] if isinstance(cells[0], list) else [] if cells[0] is None else cells
