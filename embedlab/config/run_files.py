"""The small files of a run's folder, as records."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from embedlab.config.read import read_record, read_values, record
from embedlab.errors import UserError

SCORES = "scores.json"
TRIAL = "trial.json"
MOST = 1e12
"""Of any score."""


@dataclass(frozen=True)
class Training:
    """What a run says of its training, as far as it is read again."""

    seed: int | None = None
    steps: int | None = None
    device: str | None = None


@dataclass(frozen=True)
class Recipe:
    """What is read by name of a run's configuration; the whole is beside it."""

    method: dict[str, Any] | None = None
    pooling: dict[str, Any] | None = None
    seed: int | None = None


@dataclass(frozen=True)
class Scores:
    """A file of scores by name; null stands for a score that is no number.

    Args:
        scores: ``task/metric`` to value.
        training: of a run; an evaluation has none.
        config: of the run.
        protocol: of the run, by suite.
    """

    scores: dict[str, float | None]
    training: dict[str, Any] | None = None
    config: dict[str, Any] | None = None
    protocol: dict[str, dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        for key, value in self.scores.items():
            if value is not None and abs(value) > MOST:
                fix = "another copy, or score the run again"
                raise UserError("no score is as large", key=f"scores.{key}", value=value, fix=fix)

    @property
    def numbers(self) -> dict[str, float]:
        """The scores, null as NaN."""
        return {key: math.nan if value is None else float(value) for key, value in self.scores.items()}


@dataclass(frozen=True)
class TrialEnd:
    """`trial.json`: how a trial of a sweep ended, and what makes it differ from the others."""

    status: str = "not finished"
    overrides: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Owner:
    """`.lock`: the process that works in a run's folder."""

    process: int
    host: str
    command: str

    def __str__(self) -> str:
        return f"{self.process} on {self.host}: {self.command}"


def read_scores_of_run(path: Path) -> Scores | None:
    """The scores that a run wrote; None where they are of an evaluation.

    Raises:
        UserError: a damaged file.
    """
    content = read_values(path)
    if isinstance(content, dict) and "training" not in content:
        return None
    found = record(Scores, content, path)
    record(Training, found.training, path, "training")
    record(Recipe, found.config or {}, path, "config")
    return found


def read_numbers(path: Path) -> dict[str, float]:
    """The scores in a file of them.

    Raises:
        UserError: a damaged file.
    """
    return read_record(path, Scores).numbers
