"""Figures of the suite `cls_energy`, and its relation to STS over checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from embedlab.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Scores = Mapping[str, float]
ENERGY, STS = "cls_energy/E_CLS", "sts7/spearman"
FEWEST = 10
"""Checkpoints that a correlation over checkpoints needs at least (specification, 1.9)."""


class Correlation(NamedTuple):
    spearman: float
    n: int


def by_layer(scores: Scores, metric: str) -> list[float]:
    """A quantity of the suite at layers 1, 2, ..."""
    found: list[float] = []
    while (key := f"layer{len(found) + 1:02d}/{metric}") in scores:
        found.append(float(scores[key]))
    if not found:
        raise UserError(f"these scores have no {metric} by layer", fix="scores of suite=cls_energy")
    return found


def profile_figure(runs: Mapping[str, Scores]) -> Figure:
    """Energy, attention received by the first token, and by kind of token, each by layer; a line an encoder.

    Args:
        runs: scores of `cls_energy` by the name of the encoder, such as before and after.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.4), layout="constrained")
    energy, mass, kinds = figure.subplots(1, 3)
    for name, scores in runs.items():
        layers = range(1, len(by_layer(scores, "E1")) + 1)
        energy.plot(layers, by_layer(scores, "E1"), marker="o", markersize=3, label=name)
        (line,) = mass.plot(layers, by_layer(scores, "A_CLS"), marker="o", markersize=3, label=name)
        excess = [a - d for a, d in zip(by_layer(scores, "A_CLS"), by_layer(scores, "deficit"), strict=True)]
        mass.plot(layers, excess, linestyle=":", linewidth=1, color=line.get_color())
    energy.axhline(1.0, color="grey", linewidth=0.8, linestyle=":")
    energy.set(title="CLS energy E1 (1: as the other tokens)", xlabel="layer")
    mass.set(title="attention received by CLS (dotted: 1 / n)", xlabel="layer", ylim=(0, None))
    name, scores = next(reversed(list(runs.items())))
    labels = ("CLS", "SEP", "punct", "other")
    values = [by_layer(scores, f"A_{kind}") for kind in labels]
    kinds.stackplot(range(1, len(values[0]) + 1), *values, labels=labels)
    kinds.set(title=f"attention by kind of token: {name}", xlabel="layer", ylim=(0, 1))
    for axes in (energy, kinds):
        axes.legend(fontsize=8)
    return figure


def save_profile(runs: Mapping[str, Scores], path: Path) -> None:
    """Draw `profile_figure` into a file (.png, .svg or .pdf)."""
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UserError("a figure is a .png, .svg or .pdf file", key="figure", value=path, fix=f"{path}.png")
    figure = profile_figure(runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def relation_to_sts(runs: Sequence[Scores], energy: str = ENERGY, sts: str = STS) -> Correlation:
    """Spearman's correlation of energy and STS average over the checkpoints that have a number for both.

    NaN where all of them have the same energy, or the same STS average.

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
