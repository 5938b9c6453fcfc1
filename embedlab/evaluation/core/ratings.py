"""Cosines of rated pairs, by groups of the rating (S2Sent, figure 8)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embedlab.config.build import fits

Array = NDArray[np.float64]


@dataclass(frozen=True)
class RatedCosines:
    """Cosines of rated pairs.

    Args:
        cosine: ``[n]``.
        rating: ``[n]``, 0 to 5.
    """

    cosine: Array
    rating: Array

    def groups(self, edges: tuple[float, ...] = (0, 1, 2, 3, 4, 5)) -> dict[str, Array]:
        """Cosines by rating: ``[0, 1)``, ... and the last group with its upper edge."""
        found = {}
        for low, high in itertools.pairwise(edges):
            inside = (self.rating >= low) & (
                (self.rating < high) | ((high == edges[-1]) & (self.rating <= high))
            )
            found[f"{low:g}–{high:g}"] = self.cosine[inside]
        return found

    def separation(self) -> float:
        """`separation` of the groups."""
        return separation(self.groups())


def separation(groups: Mapping[str, Array]) -> float:
    """Spread of the groups' means over the mean spread inside a group: higher tells ratings apart better.

    NaN with fewer than two groups of two pairs.
    """
    several = [g for g in groups.values() if len(g) > 1]
    if len(several) < 2:
        return float("nan")
    return float(np.std([g.mean() for g in several]) / np.mean([g.std() for g in several]))


def written(groups: Mapping[str, Array]) -> dict[str, str]:
    """The groups for a JSON file: a line of numbers each."""
    return {name: " ".join(f"{x:.4f}" for x in values) for name, values in groups.items()}


def read(lines: Mapping[str, str]) -> dict[str, Array]:
    """What `written` wrote.

    Raises:
        ValueError: anything else.
    """
    if not fits(lines, dict[str, str]):
        raise ValueError("the groups are no lines by name")
    groups = {name: np.array([float(x) for x in line.split()]) for name, line in lines.items()}
    if not all(np.isfinite(values).all() for values in groups.values()):
        raise ValueError("a cosine is not finite")
    return groups
