"""InfoNCE with in-batch candidates (SimCSE, Gao et al. 2021, equations 1, 4 and 5)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from embedlab.objectives.precision import full_precision, unit
from embedlab.objectives.softmax import Contrast, masked_softmax, with_diagnostics


@full_precision
def info_nce(
    anchors: Tensor,
    candidates: Tensor,
    tau: float,
    *,
    offset: int = 0,
    hard_negatives: Tensor | None = None,
    hard_negative_weight: float = 0.0,
    anchor_hashes: Tensor | None = None,
    candidate_hashes: Tensor | None = None,
    hard_negative_hashes: Tensor | None = None,
) -> Contrast:
    """Cross-entropy of each anchor over the cosines to all candidates, divided by ``tau``.

    ``-log(exp(cos(h_i, h_i+) / tau) / sum_j exp(cos(h_i, h_j+) / tau))`` (equation 1); with hard negatives the
    denominator has ``exp(cos(h_i, h_j-) / tau)`` too (equation 5).

    Args:
        anchors: ``[B, D]``, the rows that this rank scores.
        candidates: ``[M, D]``, positives of the whole (gathered) batch; anchor i's positive is row ``offset + i``.
        tau: temperature.
        offset: first row of this rank's positives in ``candidates``.
        hard_negatives: ``[M, D]`` in the order of ``candidates``, or ``[n, M, D]``: all first ones come after all
            positives (equation 5), then all second ones, and so on.
        hard_negative_weight: added to the logit of an anchor's own hard negatives (log of the paper's alpha).
        anchor_hashes, candidate_hashes, hard_negative_hashes: integers that are equal for equal texts, in the shapes of
            the vectors. A candidate
            whose text equals the anchor's or its positive's is no negative and leaves the denominator.

    Returns:
        The mean over the B anchors, and its diagnostics.
    """
    a, columns = unit(anchors), unit(candidates)
    if hard_negatives is not None:
        columns = torch.cat([columns, unit(hard_negatives).flatten(0, -2)])
        if anchor_hashes is not None and candidate_hashes is not None:
            assert hard_negative_hashes is not None, (
                "hard negatives need hashes when the candidates have them"
            )
            candidate_hashes = torch.cat([candidate_hashes, hard_negative_hashes.flatten()])
    target = torch.arange(len(a), device=a.device) + offset
    bias = None
    if hard_negatives is not None and hard_negative_weight != 0.0:
        column = torch.arange(len(columns), device=a.device)
        own = (column % len(candidates) == target[:, None]) & (column >= len(candidates))
        bias = hard_negative_weight * own
    softmax = masked_softmax(
        a @ columns.T, target, tau,
        bias=bias, anchor_hashes=anchor_hashes, candidate_hashes=candidate_hashes,
    )  # fmt: skip
    return with_diagnostics(cross_entropy(softmax.logits, target), softmax)
