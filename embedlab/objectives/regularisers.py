"""Alignment without negatives, what holds vectors apart without them, and what tells a collapse.

VICReg: Bardes, Ponce and LeCun 2022, equations 1, 3 and 4. SIGReg: LeJEPA, arXiv 2511.08544.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, mse_loss, normalize, relu

from embedlab.objectives.precision import full_precision, to_fp32, unit


@full_precision
def squared_distance(x: Tensor, y: Tensor) -> Tensor:
    """Mean squared difference over pairs and features, ``[B, D]`` twice (VICReg's and LeJEPA's code; their
    formulas sum over the features)."""
    return mse_loss(to_fp32(x), to_fp32(y))


@full_precision
def cosine_distance(x: Tensor, y: Tensor) -> Tensor:
    """Mean of ``1 - cos`` over pairs, ``[B, D]`` twice."""
    return (1 - cosine_similarity(to_fp32(x), to_fp32(y), dim=-1)).mean()


@torch.no_grad()
@full_precision
def std(z: Tensor) -> Tensor:
    """Standard deviation of the features of unit rows ``[N, D]`` times sqrt(D): about 1 for vectors all over the
    sphere, 0 for equal ones."""
    rows = unit(z)
    return rows.std(0, unbiased=False).mean() * z.shape[-1] ** 0.5


@torch.no_grad()
@full_precision
def participation(z: Tensor) -> Tensor:
    """Participation ratio of the covariance of unit rows ``[N, D]``: ``(sum l)^2 / sum l^2`` of its eigenvalues l,
    from 1 (one direction) to min(N - 1, D); 0 for equal rows. Needs no decomposition, so a captured step can log it."""
    rows = unit(z)
    centred = rows - rows.mean(0)
    gram = centred @ centred.T if len(z) <= z.shape[-1] else centred.T @ centred
    return gram.trace().square() / gram.square().sum().clamp(min=1e-20)


@full_precision
def variance_term(z: Tensor, gamma: float = 1.0, eps: float = 1e-4) -> Tensor:
    """``mean_j max(0, gamma - sqrt(Var(z_j) + eps))`` over the features (equation 1).

    Args:
        z: ``[N, D]``, not normalised.
        gamma: the standard deviation that is asked for.
        eps: under the root.
    """
    z = to_fp32(z)
    return relu(gamma - (z.var(0) + eps).sqrt()).mean()


@full_precision
def covariance_term(z: Tensor) -> Tensor:
    """``(1 / D) sum_{i != j} C_ij^2`` with the covariance C of the features of ``[N, D]`` (equations 3 and 4)."""
    z = to_fp32(z)
    centred = z - z.mean(0)
    covariance = centred.T @ centred / (len(z) - 1)
    return (covariance.square().sum() - covariance.diagonal().square().sum()) / z.shape[1]


@full_precision
def sigreg(
    z: Tensor,
    slices: int = 256,
    points: int = 17,
    t_max: float = 3.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Vectors held to a standard normal distribution: the mean over random directions of the Epps-Pulley statistic.

    ``N * integral |phi(t) - exp(-t^2 / 2)|^2 exp(-t^2 / 2) dt`` with the empirical characteristic function phi,
    by the trapezoid rule on [0, t_max], doubled for symmetry.

    Args:
        z: ``[N, D]``, **not** normalised: a projection of unit rows has the standard deviation 1 / sqrt(D), which no
            direction can bring to 1 (the authors of BEPA normalise, which is a defect).
        slices: directions, drawn anew each time.
        points: of the rule.
        t_max: its upper end.
        generator: of the directions; the device's default when None (needed inside a CUDA graph).
    """
    z = to_fp32(z)
    directions = torch.randn(z.shape[1], slices, device=z.device, dtype=z.dtype, generator=generator)
    projected = z @ normalize(directions, dim=0)
    t = torch.linspace(0, t_max, points, device=z.device, dtype=z.dtype)
    normal = (-t.square() / 2).exp()
    phase = projected.unsqueeze(-1) * t  # [N, slices, points]
    gap = (phase.cos().mean(0) - normal).square() + phase.sin().mean(0).square()
    return 2 * len(z) * torch.trapezoid(gap * normal, t).mean()
