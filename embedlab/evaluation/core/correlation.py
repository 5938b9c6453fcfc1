"""Rank and product-moment correlation in torch: on the device, without a host sync, in float64 where it exists;
and means over groups of tasks, languages or pairs of languages."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Member = TypeVar("Member")


def precise(x: Tensor) -> Tensor:
    """`x` in float64, or in float32 on a device that has no float64 (Apple's mps)."""
    return x.to(torch.float32 if x.device.type == "mps" else torch.float64)


def ranks(x: Tensor) -> Tensor:
    """Ranks from 1 along the last dimension, ties by their average rank (scipy's `rankdata`). [..., n] ->
    [..., n].

    Two binary searches instead of grouping equal values: the output shapes never depend on the data, so that
    a CUDA device is not asked to report back to the host.
    """
    x = x.contiguous()
    ordered = x.sort(dim=-1).values
    below = torch.searchsorted(ordered, x, right=False)
    up_to = torch.searchsorted(ordered, x, right=True)
    return precise(below + up_to + 1) / 2


def standardise(x: Tensor) -> Tensor:
    """Centred and scaled to length one along the last dimension; a constant row becomes zeros."""
    x = precise(x)
    x = x - x.mean(dim=-1, keepdim=True)
    length = x.norm(dim=-1, keepdim=True)
    # Rounding leaves a constant row at about 1e-16 instead of 0; it must not be blown up to length one.
    floor = torch.finfo(x.dtype).eps * x.shape[-1]
    return torch.where(length > floor, x / length.clamp_min(floor), torch.zeros_like(x))


def pearson(x: Tensor, y: Tensor) -> Tensor:
    """Pearson correlation along the last dimension, [..., n] -> [...]; 0 where a side is constant
    (undefined)."""
    return (standardise(x) * standardise(y)).sum(dim=-1).clamp(-1, 1)


def spearman(x: Tensor, y: Tensor) -> Tensor:
    """Spearman correlation along the last dimension, [..., n] -> [...], ties by average ranks.

    0 where a side is constant: the correlation is undefined, and a collapsed encoder must not win a
    comparison through a NaN.
    """
    return pearson(ranks(x), ranks(y))


def pair_cosine(x: Tensor, y: Tensor) -> Tensor:
    """Cosine of each row of `x` with the same row of `y`, [n, D] -> [n] in float64; NaN (a zero vector)
    becomes 0.

    One square root of the product of the squared lengths makes the cosine of two identical rows exactly 1, so
    that pairs of identical sentences tie, whatever the rounding.
    """
    x, y = precise(x), precise(y)
    dot = (x * y).sum(dim=-1)
    squared = (x * x).sum(dim=-1) * (y * y).sum(dim=-1)
    return (dot / squared.sqrt()).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


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


def flat(found: Mapping[str, Mapping[str, float]], prefix: str = "") -> dict[str, float]:
    """ "task/metric" -> value, of the metrics of each task; `prefix` is put before the tasks."""
    return {f"{prefix}{task}/{m}": value for task, each in found.items() for m, value in each.items()}


def of_pairs(pairs: Collection[tuple[str, str]], same: str, across: str) -> dict[str, list[tuple[str, str]]]:
    """Pairs of languages in two groups: of one language, and of two."""
    return {
        same: [pair for pair in pairs if pair[0] == pair[1]],
        across: [pair for pair in pairs if pair[0] != pair[1]],
    }


def accuracy(predicted: NDArray[np.int64], gold: NDArray[np.int64]) -> float:
    """Percent of labels that are right."""
    return 100 * float((predicted == gold).mean())


def f1(predicted: NDArray[np.int64], gold: NDArray[np.int64]) -> float:
    """F1 of label 1 in percent; 0 where it is neither predicted nor true."""
    hits = int(((predicted == 1) & (gold == 1)).sum())
    total = int((predicted == 1).sum() + (gold == 1).sum())
    return 100 * 2 * hits / total if total else 0.0
