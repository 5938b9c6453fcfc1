"""Symmetric InfoNCE over translation pairs with in-batch negatives of both languages (BEPA, arXiv 2601.00366)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from embedlab.objectives.precision import full_precision


class BilingualContrast(NamedTuple):
    """The loss and what shows whether it learns: scalars, fp32."""

    loss: Tensor
    """Mean over the anchors that have a negative; 0 where none has."""
    kept: Tensor
    """How many of the 2B anchors have one."""
    positive_cosine: Tensor
    """Mean cosine of translations."""
    negative_cosine: Tensor
    """Mean cosine of an anchor and its negatives."""
    accuracy: Tensor
    """Share of anchors whose translation is the nearest candidate; about 0 with ``mask_self=False``, where the
    anchor itself wins."""


@full_precision
def bilingual_nce(
    anchors: tuple[Tensor, Tensor],
    candidates: tuple[Tensor, Tensor],
    tau: float,
    *,
    offset: int = 0,
    mask_self: bool = True,
    within_language: bool = True,
    anchor_ids: tuple[Tensor, Tensor] | None = None,
    candidate_ids: tuple[Tensor, Tensor] | None = None,
) -> BilingualContrast:
    """The mean over both languages a and all rows i of
    ``-log(exp(z_i^a . z_i^b / tau) / sum_k exp(z_i^a . A_k / tau))``, unit rows, ``A = [Z^1; Z^2]``.

    Args:
        anchors: ``[B, D]`` of each language, the rows that this rank scores.
        candidates: ``[M, D]`` of each language, of the whole (gathered) batch; the translation of an anchor of
            one language is row ``offset + i`` of the other. With one rank and one set of vectors, the anchors.
        tau: temperature.
        offset: first row of this rank in the candidates.
        mask_self: leave an anchor's own row out of its denominator. The authors' code keeps it (cosine 1), so
            that aligned and otherwise orthogonal pairs cost ln 2 and not 0.
        within_language: candidates of the anchor's own language are negatives too.
        anchor_ids, candidate_ids: integers ``[B]`` and ``[M]`` of each language, equal for equal texts. A
            candidate with the anchor's or its translation's text is no negative and leaves the denominator.
    """
    a = normalize(torch.cat([_wide(z) for z in anchors]), dim=-1)
    c = normalize(torch.cat([_wide(z) for z in candidates]), dim=-1)
    cosines = a @ c.T
    size, total = len(anchors[0]), len(candidates[0])
    row = torch.arange(size, device=a.device) + offset
    own = torch.cat([row, row + total])
    target = torch.cat([row + total, row])
    column = torch.arange(2 * total, device=a.device)
    itself, positive = column == own[:, None], column == target[:, None]
    excluded = itself if mask_self else torch.zeros_like(itself)
    if not within_language:
        excluded = excluded | (((column < total) == (own[:, None] < total)) & ~itself)
    if anchor_ids is not None and candidate_ids is not None:
        first, second = anchor_ids
        texts = torch.cat(candidate_ids)
        same = (texts == torch.cat([first, second])[:, None]) | (texts == torch.cat([second, first])[:, None])
        excluded = excluded | (same & ~positive & ~itself)
    negative = ~(excluded | positive | itself)
    logits = (cosines / tau).masked_fill(excluded, float("-inf"))
    # Compared and summed, not indexed: a CUDA graph takes no index from the host.
    true = (cosines * positive).sum(1)
    kept = negative.any(1)
    each = logits.logsumexp(1) - true / tau
    count = kept.sum()
    loss = each.masked_fill(~kept, 0.0).sum() / count.clamp(min=1)
    with torch.no_grad():
        mean_negative = cosines.masked_fill(~negative, 0.0).sum() / negative.sum().clamp(min=1)
        accuracy = (logits.argmax(1) == target).float().mean()
    return BilingualContrast(loss, count, true.detach().mean(), mean_negative, accuracy)


def _wide(z: Tensor) -> Tensor:
    return z.to(torch.promote_types(z.dtype, torch.float32))
