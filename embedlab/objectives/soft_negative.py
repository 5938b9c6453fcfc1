"""How far a soft negative may be from its sentence: SNCSE's bidirectional margin loss (arXiv 2201.05979)."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import cosine_similarity

from embedlab.objectives.precision import full_precision, to_fp32


@full_precision
def bidirectional_margin(difference: Tensor, alpha: float, beta: float) -> Tensor:
    """``relu(d + alpha) + relu(-d - beta)``, the mean: nothing where d lies between -beta and -alpha.

    Args:
        difference: ``[B]``, the soft negative's cosine less the positive's.
        alpha, beta: how much less similar the negative has to be, and may be.
    """
    d = to_fp32(difference)
    return ((d + alpha).relu() + (-d - beta).relu()).mean()


@full_precision
def cosine_difference(anchors: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
    """``cos(a, n) - cos(a, p)`` of ``[B, D]`` each: ``[B]``."""
    a = to_fp32(anchors)
    return cosine_similarity(a, to_fp32(negatives)) - cosine_similarity(a, to_fp32(positives))
