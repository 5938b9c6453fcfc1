"""Means over tasks, languages, or pairs of languages."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import TypeVar

Member = TypeVar("Member")


def group_means(
    found: Mapping[Member, Mapping[str, float]],
    groups: Mapping[str, Collection[Member]],
    metrics: Sequence[str],
) -> dict[str, float]:
    """ "group/metric" -> mean over the group's members in `found`; a group without members has none."""
    return {
        f"{group}/{metric}": fmean(found[member][metric] for member in members)
        for group, members in groups.items()
        if members
        for metric in metrics
    }


def of_pairs(pairs: Collection[tuple[str, str]], same: str, across: str) -> dict[str, list[tuple[str, str]]]:
    """Pairs of languages in two groups: of one language, and of two."""
    return {
        same: [pair for pair in pairs if pair[0] == pair[1]],
        across: [pair for pair in pairs if pair[0] != pair[1]],
    }
