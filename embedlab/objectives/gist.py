"""In-batch negatives that a guide lets through (GISTEmbed: Solatorio 2024, arXiv 2402.16829)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from embedlab.objectives.precision import full_precision, unit
from embedlab.objectives.softmax import Contrast, masked_softmax, with_diagnostics


@full_precision
def gist(
    views: Sequence[Tensor],
    candidates: Sequence[Tensor],
    guide_views: Sequence[Tensor],
    guide_candidates: Sequence[Tensor],
    tau: float = 0.01,
    *,
    offset: int = 0,
    margin: float = 0.0,
    margin_kind: Literal["absolute", "relative"] = "absolute",
    anchors: bool = True,
    positives: bool = True,
    hashes: Sequence[Tensor] | None = None,
    candidate_hashes: Sequence[Tensor] | None = None,
) -> Contrast:
    """InfoNCE of each anchor over positives and negatives, other anchors, and of its positive over other positives.

    The softmax of row i has the cosines of anchor i to all positives and negatives (blocks a·p, a·n), to all anchors
    (a·a), and of its positive to all positives (p·p). A candidate goes where the guide's cosine is above
    ``g_ii - margin`` (absolute) or ``g_ii - margin |g_ii|`` (relative), with g_ii the guide's cosine of the anchor and
    its positive. The own positive stays; a row is never compared with itself, whatever the guide says.

    Args:
        views: ``[B, D]`` each: anchors, positives and any number of negatives, of this rank.
        candidates: ``[M, D]`` each, the same of the whole (gathered) batch; row i of a view is ``offset + i``.
        guide_views, guide_candidates: the guide's vectors of the same, ``[B, G]`` and ``[M, G]``.
        tau: temperature.
        offset: first row of this rank in the candidates.
        margin, margin_kind: as above; minus infinity filters nothing.
        anchors, positives: whether there are blocks a·a and p·p.
        hashes, candidate_hashes: ``[B]`` of anchors and ``[M]`` of each of the candidates, equal for equal texts, which
            leave the denominator. None: only the guide decides.

    Returns:
        The mean over the B anchors, and its diagnostics.
    """
    row = torch.arange(len(views[0]), device=views[0].device) + offset
    v, c, gv, gc = ([unit(x) for x in xs] for xs in (views, candidates, guide_views, guide_candidates))
    blocks = [(0, k) for k in range(1, len(views))] + [(0, 0)] * anchors + [(1, 1)] * positives
    cosines = torch.cat([v[i] @ c[j].T for i, j in blocks], 1)
    guided = torch.cat([gv[i] @ gc[j].T for i, j in blocks], 1)
    same_row = torch.arange(len(c[0]), device=row.device) == row[:, None]
    no_row = torch.zeros_like(same_row)
    itself = torch.cat([same_row if i == j else no_row for i, j in blocks], 1)
    positive = torch.cat([same_row] + [no_row] * (len(blocks) - 1), 1)
    true = (guided * positive).sum(1, keepdim=True)
    limit = true - margin * (true.abs() if margin_kind == "relative" else 1.0)
    excluded = (guided > limit) & ~positive
    softmax = masked_softmax(
        cosines, row, tau, itself=itself, excluded=excluded,
        anchor_hashes=None if hashes is None else hashes[0],
        candidate_hashes=None if candidate_hashes is None else torch.cat([candidate_hashes[j] for _, j in blocks]),
    )  # fmt: skip
    return with_diagnostics(cross_entropy(softmax.logits, row), softmax)
