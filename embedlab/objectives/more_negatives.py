"""InfoNCE whose anchors have negatives that are no sentences of the batch: a queue of past vectors, or mixtures."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from embedlab.objectives.precision import full_precision, to_fp32, unit
from embedlab.objectives.softmax import Contrast, MaskedSoftmax, masked_softmax, with_diagnostics


def _with_columns(softmax: MaskedSoftmax, *more: Tensor) -> Contrast:
    """The cross-entropy with more logits ``[B, X]`` in the denominator."""
    softmax = softmax._replace(logits=torch.cat([softmax.logits, *more], 1))
    return with_diagnostics(cross_entropy(softmax.logits, softmax.target), softmax)


@full_precision
def queue_nce(
    anchors: Tensor,
    candidates: Tensor,
    queue: Tensor,
    filled: Tensor,
    tau: float,
    *,
    offset: int = 0,
    anchor_hashes: Tensor | None = None,
    candidate_hashes: Tensor | None = None,
    queue_hashes: Tensor | None = None,
) -> Contrast:
    """`info_nce` with the vectors of a queue as further negatives (ESimCSE, Wu et al. 2022).

    Args:
        anchors, candidates, tau, offset: as of `info_nce`.
        queue: ``[M, D]``, without gradient.
        filled: scalar; only so many of its first rows count.
        anchor_hashes, candidate_hashes: as of `info_nce`.
        queue_hashes: ``[M]``; an entry with the anchor's or its positive's text is no negative.
    """
    a, columns = unit(anchors), unit(candidates)
    target = torch.arange(len(a), device=a.device) + offset
    softmax = masked_softmax(
        a @ columns.T, target, tau, anchor_hashes=anchor_hashes, candidate_hashes=candidate_hashes
    )
    absent = (torch.arange(len(queue), device=a.device) >= filled)[None, :]
    if anchor_hashes is not None and candidate_hashes is not None and queue_hashes is not None:
        absent = absent | (queue_hashes == anchor_hashes[:, None])
        absent = absent | (queue_hashes == candidate_hashes[target][:, None])
    past = (a @ unit(queue).T.detach() / tau).masked_fill(absent, float("-inf"))
    return _with_columns(softmax, past)


@full_precision
def mix_nce(
    anchors: Tensor,
    candidates: Tensor,
    following: Tensor,
    tau: float,
    share: float,
    *,
    offset: int = 0,
    anchor_hashes: Tensor | None = None,
    candidate_hashes: Tensor | None = None,
) -> Contrast:
    """`info_nce` with a negative more an anchor, mixed from its positive and the next one (MixCSE).

    Anchor i's is ``unit(share u_i + (1 - share) u_{i+1})`` of the unit positives u, without gradient. Where the next
    text is the anchor's own, there is none.

    Args:
        anchors, candidates, tau, offset, anchor_hashes, candidate_hashes: as of `info_nce`.
        following: ``[M]``, of each candidate the next one, the batch taken as a ring.
        share: of the positive in the mixture (the paper's lambda).
    """
    a, columns = unit(anchors), unit(candidates)
    target = torch.arange(len(a), device=a.device) + offset
    softmax = masked_softmax(
        a @ columns.T, target, tau, anchor_hashes=anchor_hashes, candidate_hashes=candidate_hashes
    )
    after = following[offset : offset + len(a)]
    u = columns.detach()
    mixed = unit(share * u[offset : offset + len(a)] + (1 - share) * u[after])
    own = (a * mixed).sum(1, keepdim=True) / tau
    if anchor_hashes is not None and candidate_hashes is not None:
        own = own.masked_fill((candidate_hashes[after] == anchor_hashes)[:, None], float("-inf"))
    return _with_columns(softmax, own)


@full_precision
def released_mix_nce(
    anchors: Tensor,
    candidates: Tensor,
    all_anchors: Tensor,
    following: Tensor,
    tau: float,
    share: float,
    *,
    offset: int = 0,
) -> Contrast:
    """MixCSE's objective as its script computes it: all mixtures are every anchor's negatives, and not of unit vectors.

    A second block has cosines of mixed anchors to the candidates, whose gradient goes to the candidates alone. In both
    blocks the entry whose larger part is the anchor's own sentence is not left out: its logit becomes 0.

    Args:
        anchors, candidates, following, tau, share, offset: as of `mix_nce`.
        all_anchors: ``[M, D]``, the anchors of the whole (gathered) batch.
    """
    a, columns = unit(anchors), unit(candidates)
    row = torch.arange(len(a), device=a.device) + offset
    softmax = masked_softmax(a @ columns.T, row, tau)

    def mixtures(x: Tensor) -> Tensor:
        x = to_fp32(x).detach()
        return unit(share * x + (1 - share) * x[following])

    to_mixed = a @ mixtures(candidates).T / tau
    to_mixed = to_mixed.masked_fill(following == row[:, None], 0.0)
    of_mixed = mixtures(all_anchors)[offset : offset + len(a)] @ columns.T / tau
    column = torch.arange(len(columns), device=a.device)
    of_mixed = of_mixed.masked_fill(column == following[offset : offset + len(a), None], 0.0)
    return _with_columns(softmax, to_mixed, of_mixed)
