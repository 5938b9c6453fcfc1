"""Alignment without negatives, which a constant encoder satisfies best, and what tells such a collapse."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, mse_loss

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
