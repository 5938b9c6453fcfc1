"""VICReg's two regularisers (Bardes, Ponce and LeCun 2022, equations 1, 3 and 4)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import relu

from embedlab.objectives.precision import full_precision


@full_precision
def variance_term(z: Tensor, gamma: float = 1.0, eps: float = 1e-4) -> Tensor:
    """``mean_j max(0, gamma - sqrt(Var(z_j) + eps))`` over the features of ``[N, D]``; not normalised rows."""
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    return relu(gamma - (z.var(0) + eps).sqrt()).mean()


@full_precision
def covariance_term(z: Tensor) -> Tensor:
    """``(1 / D) sum_{i != j} C_ij^2`` with the covariance C of the features of ``[N, D]``."""
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    centred = z - z.mean(0)
    covariance = centred.T @ centred / (len(z) - 1)
    return (covariance.square().sum() - covariance.diagonal().square().sum()) / z.shape[1]
