"""NT-Xent over interleaved views, of one encoder or across two (TNCSE, AAAI 2025; JTCSE, arXiv 2505.02366).

Rows ``2i`` and ``2i + 1`` are the two views of sentence i; the partner of row r is ``r XOR 1``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from embedlab.objectives.info_nce import Contrast
from embedlab.objectives.precision import full_precision


def interleave(first: Tensor, second: Tensor) -> Tensor:
    """``[N, ...]`` twice to ``[2N, ...]`` in the order first 0, second 0, first 1, second 1, ..."""
    return torch.stack([first, second], 1).flatten(0, 1)


@full_precision
def pair_nce(
    anchors: Tensor,
    candidates: Tensor,
    tau: float,
    *,
    offset: int = 0,
    anchor_ids: Tensor | None = None,
    candidate_ids: Tensor | None = None,
) -> Contrast:
    """The mean over rows r of ``-log(exp(cos(a_r, b_pi(r)) / tau) / sum_{c != r} exp(cos(a_r, b_c) / tau))``.

    One positive, and both views of all other sentences as negatives. The same row (``c = r``) is left out,
    also where anchors and candidates come from two encoders: it is then neither positive nor negative.

    Args:
        anchors: ``[R, D]``, interleaved, the rows that this rank scores.
        candidates: ``[M, D]``, interleaved, of the whole (gathered) batch, from the same or another encoder.
        tau: temperature.
        offset: first row of this rank in ``candidates``; even.
        anchor_ids, candidate_ids: ``[R]`` and ``[M]``, equal for equal texts. A candidate with the anchor's
            or its partner's text is no negative and leaves the denominator (the paper keeps it).

    Returns:
        The loss, the mean positive and negative cosine, and the share of rows whose partner is nearest.
    """
    a, b = _unit(anchors), _unit(candidates)
    cosines = a @ b.T
    own = torch.arange(len(a), device=a.device) + offset
    partner = own ^ 1
    columns = torch.arange(len(b), device=a.device)
    positive = columns == partner[:, None]
    excluded = columns == own[:, None]
    if anchor_ids is not None and candidate_ids is not None:
        same = (candidate_ids == anchor_ids[:, None]) | (candidate_ids == candidate_ids[partner][:, None])
        excluded = excluded | (same & ~positive)
    logits = (cosines / tau).masked_fill(excluded, float("-inf"))
    loss = cross_entropy(logits, partner)
    with torch.no_grad():
        negative = ~(positive | excluded)
        mean_positive = cosines.gather(1, partner[:, None]).mean()
        mean_negative = cosines.masked_fill(~negative, 0.0).sum() / negative.sum().clamp(min=1)
        accuracy = (logits.argmax(1) == partner).float().mean()
    return Contrast(loss, mean_positive, mean_negative, accuracy)


def _unit(x: Tensor) -> Tensor:
    return normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1)
