"""Symmetric InfoNCE over translation pairs with in-batch negatives of both languages (BEPA, arXiv 2601.00366)."""

from __future__ import annotations

import torch
from torch import Tensor

from embedlab.objectives.precision import full_precision, unit
from embedlab.objectives.softmax import Contrast, masked_softmax, with_diagnostics


@full_precision
def bilingual_nce(
    anchors: tuple[Tensor, Tensor],
    candidates: tuple[Tensor, Tensor],
    tau: float,
    *,
    offset: int = 0,
    mask_self: bool = True,
    within_language: bool = True,
    anchor_hashes: tuple[Tensor, Tensor] | None = None,
    candidate_hashes: tuple[Tensor, Tensor] | None = None,
) -> tuple[Contrast, Tensor]:
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
        anchor_hashes, candidate_hashes: integers ``[B]`` and ``[M]`` of each language, equal for equal texts. A
            candidate with the anchor's or its translation's text is no negative and leaves the denominator.

    Returns:
        The mean over the anchors that have a negative (0 where none has) and its diagnostics, and how many of the 2B
        anchors these are. With ``mask_self=False`` the accuracy is about 0: the anchor itself is nearest.
    """
    a, c = unit(torch.cat(anchors)), unit(torch.cat(candidates))
    total = len(candidates[0])
    row = torch.arange(len(anchors[0]), device=a.device) + offset
    itself_at, target = torch.cat([row, row + total]), torch.cat([row + total, row])
    column = torch.arange(2 * total, device=a.device)
    itself, excluded = column == itself_at[:, None], None
    if not within_language:
        excluded = ((column < total) == (itself_at[:, None] < total)) & ~itself
    softmax = masked_softmax(
        a @ c.T, target, tau,
        itself=itself, mask_self=mask_self, excluded=excluded,
        anchor_hashes=None if anchor_hashes is None else torch.cat(anchor_hashes),
        candidate_hashes=None if candidate_hashes is None else torch.cat(candidate_hashes),
    )  # fmt: skip
    # Compared and summed, not indexed: a CUDA graph takes no index from the host.
    true = (softmax.cosines * softmax.positive).sum(1)
    kept = softmax.negative.any(1)
    each = softmax.logits.logsumexp(1) - true / tau
    count = kept.sum()
    loss = each.masked_fill(~kept, 0.0).sum() / count.clamp(min=1)
    return with_diagnostics(loss, softmax), count
