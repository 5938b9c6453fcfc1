"""The shape of a set of sentence vectors: pure functions of tensors.

Alignment and uniformity are Wang & Isola's (ICML 2020, eq. 1 and 2 with alpha = 2, t = 2). Every function but
`singular_values` normalises the rows to length one first and returns a 0-dim float64 tensor on the vectors'
device (float32 where the device has no float64), so that several can be computed before the host asks for a
number. A zero row stays a zero row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from embedlab.evaluation.core.correlation import precise
from embedlab.evaluation.core.table import Metric


def unit(x: Tensor) -> Tensor:
    """Rows of length one, [n, D], in float64 (float32 on mps)."""
    return torch.nn.functional.normalize(precise(x), dim=-1, eps=1e-30)


def alignment(x: Tensor, y: Tensor) -> Tensor:
    """Mean squared distance of positive pairs, rows of `x` and `y` [n, D]; lower is better; in [0, 4]."""
    return (unit(x) - unit(y)).square().sum(dim=-1).mean()


def _pair_potential(x: Tensor, t: float, chunk: int) -> Tensor:
    """Mean over the distinct pairs i < j of exp(-t |x_i - x_j|^2), rows of `x` of length one."""
    n = x.shape[0]
    if n < 2:
        return torch.full((), math.nan, dtype=x.dtype, device=x.device)
    # The products run in float32 (6 times faster on a CPU, far faster on a GPU) and are summed in the wide
    # type: an error of 1e-7 in a cosine moves the result by 4e-7 at most.
    narrow = x.float()
    total = torch.zeros((), dtype=x.dtype, device=x.device)
    for start in range(0, n, chunk):
        rows = narrow[start : start + chunk]
        rest = narrow[start:]
        cosine = rows @ rest.T
        potential = torch.exp((cosine - 1).mul_(2 * t).clamp_(max=0))
        # Column j of the block is row start + j, so the strict upper triangle holds the pairs i < j.
        total = total + potential.triu_(diagonal=1).sum(dtype=x.dtype)
    return total / (n * (n - 1) / 2)


def uniformity(x: Tensor, t: float = 2.0, chunk: int = 256) -> Tensor:
    """Log of the mean Gaussian potential over distinct pairs of rows of `x` [n, D]; lower is better; in
    [-4t, 0].

    Memory: chunk x n floats. NaN for fewer than two rows.
    """
    return _pair_potential(unit(x), t, chunk).log()


def mean_cosine(x: Tensor) -> Tensor:
    """Mean cosine over distinct pairs of rows of `x` [n, D]: 1 means collapse. Closed form, O(n D).

    NaN for fewer than two rows.
    """
    x = unit(x)
    n = x.shape[0]
    own = x.square().sum()
    return (x.sum(dim=0).square().sum() - own) / (n * (n - 1) if n > 1 else math.nan)


def singular_values(x: Tensor, center: bool = False) -> Tensor:
    """Singular values of `x` [n, D] as given (not normalised), largest first, [min(n, D)]; `center` subtracts
    the mean row first.

    From the smaller Gram matrix, so a value below about 1e-8 of the largest is rounding. All NaN where `x` holds
    a NaN or an infinity.
    """
    x = precise(x)
    if center:
        x = x - x.mean(dim=0, keepdim=True)
    gram = x.T @ x if x.shape[0] >= x.shape[1] else x @ x.T
    # eigvalsh would raise; a choice on the device asks the host for nothing.
    finite = gram.isfinite().all()
    values = torch.linalg.eigvalsh(torch.where(finite, gram, 0)).clamp_min(0).sqrt().flip(0)
    return torch.where(finite, values, math.nan)


def _entropy_rank(values: Tensor, noise: Tensor) -> Tensor:
    finite = values.isfinite().all()
    values = torch.where(values > noise, values, torch.zeros_like(values))
    share = values / values.sum().clamp_min(torch.finfo(values.dtype).tiny)
    return torch.where(finite, torch.special.entr(share).sum().exp(), math.nan)


def effective_rank(x: Tensor) -> Tensor:
    """exp(entropy of the normalised singular values) of the centred matrix of unit rows, [n, D] -> [1, min(n,
    D)].

    Roy & Vetterli (EUSIPCO 2007). Centred, so it counts the directions in which the sentences differ;
    `rankme` is the same without centring. Equal vectors give 1. Read it next to `mean_cosine`, which centring
    removes.
    """
    x = unit(x)
    # What is left of equal rows after centring is rounding of the encoder's float32, of full rank: it must
    # not count.
    return _entropy_rank(singular_values(x, center=True), 1e-6 * x.norm())


def rankme(x: Tensor) -> Tensor:
    """exp(entropy of sigma / sum(sigma)) of the un-centred matrix of unit rows, [n, D] (BEPA's validation
    metric; Garrido et al. 2023). Equal vectors give 1."""
    x = unit(x)
    return _entropy_rank(singular_values(x), 1e-7 * x.norm())


def pc1_share(x: Tensor) -> Tensor:
    """Share of the variance of the unit rows of `x` [n, D] on their first principal component (centred), in
    [0, 1].

    0 when the rows are all equal.
    """
    variance = singular_values(unit(x), center=True).square()
    return variance[0] / variance.sum().clamp_min(torch.finfo(variance.dtype).tiny)


def alignment_ratio(x: Tensor, y: Tensor, sentences: Tensor) -> Tensor:
    """Mean squared distance of the positive pairs (x, y) over that of all distinct pairs of `sentences`;
    lower is better, 1 when positives are no closer than chance, NaN at total collapse.

    This project's reconstruction of CSE-SFP's alignment ratio: the paper's formula was not found.
    """
    apart = 2 * (1 - mean_cosine(sentences))
    # A collapsed encoder leaves rounding in both terms, and their ratio would look like a score.
    return torch.where(apart > 1e-9, alignment(x, y) / apart, torch.full_like(apart, math.nan))


def uniformity_ratio(x: Tensor, y: Tensor, sentences: Tensor, t: float = 2.0, chunk: int = 256) -> Tensor:
    """Mean Gaussian potential of the positive pairs (x, y) over that of all distinct pairs of `sentences`;
    higher is better, 1 when positives are no closer than chance, NaN at total collapse.

    This project's reconstruction of CSE-SFP's uniformity ratio: the paper's formula was not found.
    """
    close = torch.exp(-t * (unit(x) - unit(y)).square().sum(dim=-1)).mean()
    apart = 2 * (1 - mean_cosine(sentences))
    ratio = close / _pair_potential(unit(sentences), t, chunk)
    return torch.where(apart > 1e-9, ratio, torch.full_like(ratio, math.nan))


def summary(sentences: Tensor, x: Tensor | None = None, y: Tensor | None = None) -> dict[str, float]:
    """All of the above as floats: uniformity, mean_cosine, effective_rank, rankme, pc1_share of `sentences`
    [n, D] and, given positive pairs (x, y) [m, D], alignment and the two ratios."""
    result = {
        "uniformity": uniformity(sentences),
        "mean_cosine": mean_cosine(sentences),
        "effective_rank": effective_rank(sentences),
        "rankme": rankme(sentences),
        "pc1_share": pc1_share(sentences),
    }
    if x is not None and y is not None:
        result["alignment"] = alignment(x, y)
        result["alignment_ratio"] = alignment_ratio(x, y, sentences)
        result["uniformity_ratio"] = uniformity_ratio(x, y, sentences)
    return {name: float(value) for name, value in result.items()}


POSITIVE_RATING = 4.0
"""STS-B pairs rated above this are the positives of `alignment` (SimCSE, issue 122 of its repository)."""


def geometry_metrics(prefix: str = "geometry") -> tuple[Metric, ...]:
    """Geometry rows for the scores under `prefix`/."""
    return (
        Metric(f"{prefix}/alignment", "alignment", "lower", 3),
        Metric(f"{prefix}/uniformity", "uniformity", "lower", 3),
        Metric(f"{prefix}/mean_cosine", "mean cosine", None, 3),
        Metric(f"{prefix}/effective_rank", "effective rank", "higher", 1),
        Metric(f"{prefix}/rankme", "RankMe", "higher", 1),
        Metric(f"{prefix}/pc1_share", "PC1 share of variance", "lower", 3),
        Metric(f"{prefix}/alignment_ratio", "alignment ratio (our reconstruction)", "lower", 3),
        Metric(f"{prefix}/uniformity_ratio", "uniformity ratio (our reconstruction)", "higher", 3),
    )
