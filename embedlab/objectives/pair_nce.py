"""NT-Xent over interleaved views, of one encoder or across two (TNCSE, AAAI 2025; JTCSE, arXiv 2505.02366).

Rows ``2i`` and ``2i + 1`` are the two views of sentence i; the partner of row r is ``r XOR 1``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from embedlab.objectives.precision import full_precision, unit
from embedlab.objectives.softmax import Contrast, masked_softmax, with_diagnostics


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
    kept: Tensor | None = None,
    anchor_hashes: Tensor | None = None,
    candidate_hashes: Tensor | None = None,
) -> Contrast:
    """The mean over rows r of ``-log(exp(cos(a_r, b_pi(r)) / tau) / sum_{c != r} exp(cos(a_r, b_c) / tau))``.

    One positive, and both views of all other sentences as negatives. The same row (``c = r``) is left out,
    also where anchors and candidates come from two encoders: it is then neither positive nor negative.

    Args:
        anchors: ``[R, D]``, interleaved, the rows that this rank scores.
        candidates: ``[M, D]``, interleaved, of the whole (gathered) batch, from the same or another encoder.
        tau: temperature.
        offset: first row of this rank in ``candidates``; even.
        kept: bool ``[R]``, rows whose partner is a positive; the others add 0 to the mean over all rows. None: all.
        anchor_hashes, candidate_hashes: ``[R]`` and ``[M]``, equal for equal texts. A candidate with the anchor's
            or its partner's text is no negative and leaves the denominator (the paper keeps it).

    Returns:
        The loss, the mean positive and negative cosine, and the share of rows whose partner is nearest.
    """
    a, b = unit(anchors), unit(candidates)
    row = torch.arange(len(a), device=a.device) + offset
    partner = row ^ 1
    softmax = masked_softmax(
        a @ b.T, partner, tau,
        itself=torch.arange(len(b), device=a.device) == row[:, None],
        anchor_hashes=anchor_hashes, candidate_hashes=candidate_hashes,
    )  # fmt: skip
    if kept is None:
        loss = cross_entropy(softmax.logits, partner)
    else:
        loss = cross_entropy(softmax.logits, partner, reduction="none").masked_fill(~kept, 0.0).mean()
    return with_diagnostics(loss, softmax)
