"""Pairs of sentences with a score of their similarity."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from embedlab.config.data import DataConfig
from embedlab.data.kinds import DataKind, RawRow
from embedlab.data.reader import Reader


class Scored(DataKind):
    """``data=scored``, as STS-B. With ``data.score_range=[0,5]`` scores are mapped to 0 … 1."""

    name = "scored"
    roles = ("first", "second")
    usual: ClassVar = {
        "first": ("first", "sentence1", "text1"),
        "second": ("second", "sentence2", "text2"),
        "score": ("score", "label", "similarity"),
    }
    numbers: ClassVar = {"score": float}
    keys: ClassVar = {"score_range": "scores"}

    def rows(
        self, readers: Sequence[Reader], roles: tuple[str, ...], config: DataConfig, dropped: Counter[str]
    ) -> Iterator[RawRow]:
        for table, row, (*texts, score), group in super().rows(readers, roles, config, dropped):
            if config.score_range is not None:
                score = _mapped(score, config.score_range, readers[table], row)
            yield table, row, (*texts, score), group


def _mapped(score: Any, limits: Sequence[float], reader: Reader, row: int) -> Any:
    """The score from 0 to 1; what is no number stays, to be refused as that."""
    try:
        number = float(score)
    except (TypeError, ValueError):
        return score
    low, high = limits
    if math.isfinite(number) and not low <= number <= high:
        raise reader.error(
            f"score {number:g} is outside data.score_range=[{low:g},{high:g}]",
            row,
            key="data.score_range",
            fix="the range of the scores, or null to take them as they are",
        )
    return (number - low) / (high - low)
