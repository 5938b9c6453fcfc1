"""What is mined, and in what form it is written; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from embedlab.errors import UserError, one_of

Format = Literal["triplets", "tuples", "lists", "scored"]
FORMATS: tuple[Format, ...] = get_args(Format)
SUFFIXES = (".jsonl", ".csv", ".parquet")
Sampling = Literal["top", "random"]
FILTERS = ("same text", "absolute_margin", "relative_margin", "max_score", "min_score")
"""Why candidates are left out, in the order in which they are."""
_DEEPER = 10
"""Ranks that are looked at for each negative where a filter may take some."""


@dataclass(frozen=True)
class MineSettings:
    """What counts as a hard negative.

    Args:
        negatives: a query.
        range_min: the first rank that is taken, from 0.
        range_max: the rank after the last one; None: ``range_min`` and the number of negatives, ten times that where
            there is a filter.
        max_score, min_score: of a negative.
        absolute_margin: a negative's score is at least this below the lowest one of the query's positives.
        relative_margin: the same as a share of that score's size.
        sampling: the first ones, or a sample.
        seed: of the sample.
        teacher: whether another encoder scores what these filters read.
        scores: whether scores are written.

    Raises:
        UserError: a value that makes no sense, by key.
    """

    negatives: int = 3
    range_min: int = 0
    range_max: int | None = None
    max_score: float | None = None
    min_score: float | None = None
    absolute_margin: float | None = None
    relative_margin: float | None = None
    sampling: Sampling = "top"
    seed: int = 0
    teacher: bool = False
    scores: bool = False

    def __post_init__(self) -> None:
        if self.sampling not in get_args(Sampling):
            fix = one_of(self.sampling, get_args(Sampling))
            raise UserError("no such sampling", key="sampling", value=self.sampling, fix=fix)
        for key, least in (("negatives", 1), ("range_min", 0), ("seed", 0)):
            if type(value := getattr(self, key)) is not int or value < least:
                raise UserError("not a whole number", key=key, value=value, fix=f"{least} or more")
        if self.range_max is not None and type(self.range_max) is not int:
            raise UserError(
                "not a whole number", key="range_max", value=self.range_max, fix="a rank, or null"
            )
        if self.last - self.range_min < self.negatives:
            held = max(0, self.last - self.range_min)
            told = f"ranks {self.range_min} to {self.last} hold {held}"
            raise UserError(told, key="negatives", value=self.negatives, fix="a larger range_max, or fewer")
        for key, low, high in (("relative_margin", 0, 1), ("absolute_margin", 0, 2), ("max_score", -1, 1),
                               ("min_score", -1, 1)):  # fmt: skip
            value = getattr(self, key)
            if value is not None and not (type(value) in (int, float) and low <= value <= high):
                raise UserError("out of range", key=key, value=value, fix=f"{low} to {high}")
        if self.teacher and not self.filtered and not self.scores:
            fix = "relative_margin=0.05, another filter, or scores=true"
            raise UserError("a teacher changes nothing without a filter or scores", key="teacher", fix=fix)

    @property
    def filtered(self) -> bool:
        """Whether scores decide."""
        return any(getattr(self, name) is not None for name in FILTERS[1:])

    @property
    def last(self) -> int:
        """`range_max`, or what stands for it."""
        if self.range_max is not None:
            return self.range_max
        return self.range_min + self.negatives * (_DEEPER if self.filtered else 1)


def check_output(path: Path, kind: str) -> None:
    """UserError for a format that there is not, or that a file of this name cannot hold."""
    if kind not in FORMATS:
        raise UserError("no such format", key="format", value=kind, fix=one_of(kind, FORMATS))
    if path.suffix.lower() not in SUFFIXES:
        raise UserError("unknown kind of output", file=path, fix=f"end its name in {', '.join(SUFFIXES)}")
    if kind == "lists" and path.suffix.lower() == ".csv":
        fix = "a .jsonl or .parquet file, or format=tuples"
        raise UserError("a .csv file has no lists", key="format", value=kind, fix=fix)
