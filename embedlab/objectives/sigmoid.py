"""Pairwise sigmoid loss (SigLIP: Zhai et al. 2023, arXiv 2303.15343, equation 1)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from embedlab.objectives.precision import full_precision, unit
from embedlab.objectives.softmax import Contrast


@full_precision
def sigmoid(
    anchors: Tensor,
    candidates: Tensor,
    log_scale: Tensor,
    bias: Tensor,
    *,
    offset: int = 0,
    excluded: Tensor | None = None,
) -> Contrast:
    """``-1/B sum over i, j of log sigmoid(z_ij (t cos_ij + b))``, z = 1 for an anchor's own positive, else -1.

    Every pair is a term of its own: the sums over pieces of the candidates add up to that over all.

    Args:
        anchors: ``[B, D]``, the rows that this rank scores.
        candidates: ``[M, D]``, of the whole (gathered) batch; anchor i's positive is row ``offset + i``.
        log_scale: a scalar, t' with t = exp(t').
        bias: a scalar, b.
        offset: first row of this rank in ``candidates``.
        excluded: bool ``[B, M]``, pairs that are no term (a text that comes again); the own positive stays.

    Returns:
        The sum over the terms of this rank's anchors, divided by B, and its diagnostics.
    """
    cosines = unit(anchors) @ unit(candidates).T
    row = torch.arange(len(anchors), device=anchors.device) + offset
    positive = torch.arange(len(candidates), device=anchors.device) == row[:, None]
    sign = torch.where(positive, 1.0, -1.0)
    terms = -logsigmoid(sign * (log_scale.exp() * cosines + bias))
    negative = ~positive
    if excluded is not None:
        negative = negative & ~excluded
        terms = terms.masked_fill(~(positive | negative), 0.0)
    loss = terms.sum() / len(anchors)
    with torch.no_grad():
        near, apart = ((cosines * pairs).sum() / pairs.sum().clamp(min=1) for pairs in (positive, negative))
        accuracy = (cosines.argmax(1) == row).float().mean()
    return Contrast(loss, near, apart, accuracy)
