"""What a comparison over seeds can and cannot show."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from scipy.stats import t as student

from embedlab.errors import UserError

CONFIDENCE, POWER = 0.95, 0.8


@dataclass(frozen=True)
class Difference:
    """A recipe minus the baseline, paired by seed.

    Args:
        n: seeds that both have.
        mean: of the differences.
        low, high: 95 % confidence interval (Student's t); NaN with one seed.
        detectable: the smallest true difference that so many seeds would have shown in four of five
            experiments, given the spread seen here; NaN with one seed.
    """

    n: int
    mean: float
    low: float
    high: float
    detectable: float

    def text(self, digits: int = 2) -> str:
        """The mean with its interval, ``+0.22 [-0.01, +0.44]``; with one seed the mean alone."""
        mean = f"{self.mean:+.{digits}f}"
        return mean if self.n < 2 else f"{mean} [{self.low:+.{digits}f}, {self.high:+.{digits}f}]"

    @property
    def verdict(self) -> str:
        """``better`` or ``worse`` where the interval leaves out 0 (higher is better), else ``not resolved``."""
        if self.n < 2 or self.low <= 0 <= self.high:
            return "not resolved"
        return "better" if self.mean > 0 else "worse"


def paired_difference(values: Mapping[int, float], baseline: Mapping[int, float]) -> Difference | None:
    """The difference of two recipes over the seeds that both have.

    Args:
        values: seed to score; NaN counts as no score.
        baseline: the same of the recipe that it is compared with.

    Returns: mean, interval and detectable difference, in the scores' unit; None where there is no seed in common.
    """
    both = {seed: values[seed] - baseline[seed] for seed in sorted(values.keys() & baseline.keys())}
    change = [difference for difference in both.values() if not math.isnan(difference)]
    if not change:
        return None
    mean, n = statistics.fmean(change), len(change)
    if n == 1:
        return Difference(1, mean, math.nan, math.nan, math.nan)
    error = statistics.stdev(change) / math.sqrt(n)
    half = float(student.ppf((1 + CONFIDENCE) / 2, n - 1)) * error
    detectable = half + float(student.ppf(POWER, n - 1)) * error
    return Difference(n, mean, mean - half, mean + half, detectable)


Scores = Mapping[str, float]
ENERGY, STS = "cls_energy/E_CLS", "sts7/spearman"
FEWEST = 10
"""Checkpoints that a correlation over checkpoints needs at least (specification, 1.9)."""


class Correlation(NamedTuple):
    """Spearman's correlation in [-1, 1] over ``n`` checkpoints."""

    spearman: float
    n: int


def relation_to_sts(runs: Sequence[Scores], energy: str = ENERGY, sts: str = STS) -> Correlation:
    """Spearman's correlation of energy and STS average over the checkpoints that have a number for both.

    Args:
        runs: scores of each checkpoint; numbers that are not finite are left out.
        energy, sts: names of the two scores.

    Returns: the correlation in [-1, 1] and the number of checkpoints; NaN where all of them have the same energy, or
    the same STS average.

    Raises:
        UserError: fewer than `FEWEST` checkpoints, from which nothing follows.
    """
    from scipy.stats import spearmanr

    both = [(scores[energy], scores[sts]) for scores in runs if energy in scores and sts in scores]
    # One collapsed run would make the correlation of all others NaN.
    pairs = [pair for pair in both if all(map(math.isfinite, pair))]
    if len(pairs) < FEWEST:
        raise UserError(
            f"{len(pairs)} checkpoints have both {energy} and {sts}",
            fix=f"at least {FEWEST} for a correlation",
        )
    if any(len(set(values)) == 1 for values in zip(*pairs, strict=True)):
        return Correlation(math.nan, len(pairs))
    result: Any = spearmanr(*zip(*pairs, strict=True))
    return Correlation(float(result.statistic), len(pairs))
