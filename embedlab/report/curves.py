"""What a run wrote while it trained: `metrics.csv` as curves."""

from __future__ import annotations

import csv
import logging
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from embedlab.errors import printable

log = logging.getLogger(__name__)
METRICS = "metrics.csv"
Curve = Sequence[tuple[int, float]]
"""Step and value, in the order of the steps."""


def read_curves(path: Path, names: Iterable[str]) -> dict[str, Curve]:
    """The curves of a run.

    Args:
        path: of its ``metrics.csv``.
        names: columns, such as ``train/loss``.

    Returns: by column, those that have a finite number. Empty, with a line in the log, where the file is no table.
    """
    found: dict[str, dict[int, float]] = {name: {} for name in names}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                for name, points in found.items():
                    if (value := row.get(name)) and math.isfinite(number := float(value)):
                        points[int(row["step"])] = number
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        log.warning("No curves of %s: %s", printable(str(path)), error)
        return {}
    return {name: sorted(points.items()) for name, points in found.items() if points}


def mean_curve(curves: Sequence[Curve]) -> list[tuple[int, float, float, float]]:
    """The mean over seeds, where all of them have a value.

    Args:
        curves: of the seeds.

    Returns: step, mean, lowest and highest of each step.
    """
    values: Sequence[Mapping[int, float]] = [dict(curve) for curve in curves]
    shared = sorted(set.intersection(*map(set, values))) if values else []
    at = {step: [v[step] for v in values] for step in shared}
    return [(step, statistics.fmean(v), min(v), max(v)) for step, v in at.items()]
