"""Shuffled group whitening (Zhuo et al. 2023, arXiv 2305.17746): groups of features decorrelated over a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from embedlab.objectives.precision import full_precision, to_fp32


@full_precision
def group_whitening(x: Tensor, order: Tensor, groups: int, eps: float) -> Tensor:
    """Each group of features, centred, times the inverse root of its covariance (ZCA), in fp32.

    Args:
        x: ``[B, D]``; more rows than a group has features, or its covariance has no inverse but for ``eps``.
        order: ``[D]``, a permutation: groups are of features that are neighbours in it.
        groups: of D / groups features each.
        eps: added to the covariance's eigenvalues.

    Returns:
        ``[B, D]``, every feature in its former place.
    """
    rows, width = x.shape
    shuffled = to_fp32(x)[:, order].view(rows, groups, width // groups)
    centred = shuffled - shuffled.mean(0)
    covariance = torch.einsum("bgi,bgj->gij", centred, centred) / rows
    white = torch.einsum("bgi,gij->bgj", centred, inverse_root(covariance, eps))
    return white.reshape(rows, width)[:, order.argsort()]


def inverse_root(matrix: Tensor, eps: float) -> Tensor:
    """``(S + eps)^(-1/2)`` of symmetric matrices ``[..., d, d]`` without negative eigenvalues but for rounding."""
    found: Tensor = _InverseRoot.apply(matrix, eps)
    return found


class _InverseRoot(torch.autograd.Function):
    """The gradient of eigenvectors has no bound where eigenvalues meet; that of the root has (Daleckii and Krein)."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, eps: float) -> Tensor:
        values, vectors = torch.linalg.eigh(matrix)
        roots = (values.clamp(min=0) + eps).sqrt()
        ctx.save_for_backward(roots, vectors)
        return vectors / roots.unsqueeze(-2) @ vectors.mT

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        roots, vectors = ctx.saved_tensors
        a, b = roots.unsqueeze(-1), roots.unsqueeze(-2)
        inner = vectors.mT @ (grads[0] + grads[0].mT) @ vectors / 2
        return -vectors @ (inner / (a * b * (a + b))) @ vectors.mT, None
