"""InfoNCE with in-batch candidates (SimCSE, Gao et al. 2021, equations 1, 4 and 5)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from embedlab.objectives.precision import full_precision


class Contrast(NamedTuple):
    """The loss and what shows whether it learns: all scalars, fp32."""

    loss: Tensor
    positive_cosine: Tensor
    """Mean cosine of an anchor and its positive."""
    negative_cosine: Tensor
    """Mean cosine of an anchor and its in-batch negatives (masked candidates left out)."""
    accuracy: Tensor
    """Share of anchors whose positive is the nearest candidate."""


@full_precision
def info_nce(
    anchors: Tensor,
    candidates: Tensor,
    tau: float,
    *,
    offset: int = 0,
    hard_negatives: Tensor | None = None,
    hard_negative_weight: float = 0.0,
    anchor_ids: Tensor | None = None,
    candidate_ids: Tensor | None = None,
    hard_negative_ids: Tensor | None = None,
) -> Contrast:
    """Cross-entropy of each anchor over the cosines to all candidates, divided by ``tau``.

    Args:
        anchors: ``[B, D]``, the rows that this rank scores.
        candidates: ``[M, D]``, positives of the whole (gathered) batch; anchor i's positive is row ``offset + i``.
        tau: temperature.
        offset: first row of this rank's positives in ``candidates``.
        hard_negatives: ``[M, D]`` in the order of ``candidates``; they come after all positives (equation 5).
        hard_negative_weight: added to the logit of an anchor's own hard negative (log of the paper's alpha).
        anchor_ids, candidate_ids, hard_negative_ids: integers that are equal for equal texts. A candidate whose
            text equals the anchor's or its positive's is no negative and leaves the denominator.

    Returns:
        The mean over the B anchors.
    """
    a = normalize(anchors.float(), dim=-1)
    columns = normalize(candidates.float(), dim=-1)
    if hard_negatives is not None:
        columns = torch.cat([columns, normalize(hard_negatives.float(), dim=-1)])
    cosines = a @ columns.T
    rows = torch.arange(len(a), device=a.device)
    target = rows + offset
    # Compared, not written by index: that copies the value from the host, which a CUDA graph does not allow.
    place = torch.arange(len(columns), device=a.device)
    own = place == target[:, None]
    excluded = torch.zeros_like(own)
    if anchor_ids is not None and candidate_ids is not None:
        ids = candidate_ids
        if hard_negatives is not None:
            assert hard_negative_ids is not None, "hard negatives need ids when the candidates have them"
            ids = torch.cat([candidate_ids, hard_negative_ids])
        positive_ids = candidate_ids[target]
        excluded = (ids[None] == anchor_ids[:, None]) | (ids[None] == positive_ids[:, None])
        excluded = excluded & ~own
    logits = (cosines / tau).masked_fill(excluded, float("-inf"))
    if hard_negatives is not None and hard_negative_weight != 0.0:
        logits = logits + hard_negative_weight * (place == len(candidates) + target[:, None])
    loss = cross_entropy(logits, target)
    with torch.no_grad():
        negative = ~(own | excluded)
        positive = cosines[rows, target]
        mean_negative = (cosines * negative).sum() / negative.sum().clamp(min=1)
        accuracy = (logits.argmax(1) == target).float().mean()
    return Contrast(loss, positive.detach().mean(), mean_negative, accuracy)
