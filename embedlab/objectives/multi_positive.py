"""InfoNCE with several positives: supervised contrastive learning (Khosla et al. 2020, arXiv 2004.11362)."""

from __future__ import annotations

import torch
from torch import Tensor

from embedlab.objectives.precision import full_precision, unit
from embedlab.objectives.softmax import Contrast


@full_precision
def multi_positive(
    anchors: Tensor,
    candidates: Tensor,
    labels: Tensor,
    candidate_labels: Tensor,
    tau: float = 0.05,
    *,
    itself: Tensor | None = None,
    excluded: Tensor | None = None,
) -> tuple[Contrast, Tensor]:
    """The mean over anchors i with a positive of
    ``-1/|P_i| sum over p in P_i of log(exp(s_ip / tau) / sum over c != i of exp(s_ic / tau))``.

    (Equation 2.) With one positive each it is InfoNCE; its least value is log |P_i|.

    Args:
        anchors: ``[B, D]``, the rows that this rank scores.
        candidates: ``[M, D]``, of the whole (gathered) batch.
        labels, candidate_labels: integers ``[B]`` and ``[M]``: P_i are the candidates of the anchor's label.
        tau: temperature.
        itself: bool ``[B, M]``, where a candidate is the anchor's own row, which is no candidate. None: nowhere.
        excluded: bool ``[B, M]``, candidates that are no negatives (a text that comes again); positives stay.

    Returns:
        The mean over the anchors that have a positive (0 where none has) with its diagnostics, and how many of the B
        anchors these are.
    """
    cosines = unit(anchors) @ unit(candidates).T
    own = torch.zeros_like(cosines, dtype=torch.bool) if itself is None else itself
    positive = (labels[:, None] == candidate_labels) & ~own
    negative = ~positive & ~own
    if excluded is not None:
        negative = negative & ~excluded
    absent = ~(positive | negative)
    log_softmax = (cosines / tau).masked_fill(absent, float("-inf")).log_softmax(1)
    each = -log_softmax.masked_fill(~positive, 0.0).sum(1) / positive.sum(1).clamp(min=1)
    kept = positive.any(1)
    loss = each.masked_fill(~kept, 0.0).sum() / kept.sum().clamp(min=1)
    with torch.no_grad():
        near, apart = ((cosines * pairs).sum() / pairs.sum().clamp(min=1) for pairs in (positive, negative))
        nearest = positive.gather(1, cosines.masked_fill(absent, float("-inf")).argmax(1, keepdim=True))
    return Contrast(loss, near, apart, nearest.float().mean()), kept.sum()
