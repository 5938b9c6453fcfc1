"""PCL's losses on lists of cosines: several positives, and two encoders' lists held to each other (Wu et al. 2022)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from embedlab.objectives.precision import full_precision, to_fp32, unit


@full_precision
def peer_logits(
    anchors: Tensor,
    positives: Tensor,
    others: Tensor,
    tau: float,
    *,
    offset: int = 0,
    anchor_hashes: Tensor | None = None,
    other_hashes: Tensor | None = None,
) -> Tensor:
    """Cosines of an anchor to its positives and then to all others, over ``tau``; ``-inf``: not in its list.

    Args:
        anchors: ``[B, D]``, the rows that this rank scores.
        positives: ``[K, B, D]``, of each anchor K views.
        others: ``[M, D]``, one view of each sentence of the whole (gathered) batch.
        tau: temperature.
        offset: first row of this rank's sentences in ``others``; an anchor's own one is left out.
        anchor_hashes, other_hashes: integers ``[B]`` and ``[M]``, equal for equal texts; another row with the anchor's
            text is left out too. None: it stays.

    Returns:
        ``[B, K + M]``
    """
    a, columns = unit(anchors), unit(others)
    own = torch.arange(len(a), device=a.device) + offset
    absent = torch.arange(len(columns), device=a.device) == own[:, None]
    if anchor_hashes is not None and other_hashes is not None:
        absent = absent | (other_hashes == anchor_hashes[:, None])
    near = (a * unit(positives)).sum(-1).T
    return torch.cat([near, (a @ columns.T).masked_fill(absent, float("-inf"))], 1) / tau


@full_precision
def positives_bce(logits: Tensor, positives: int) -> Tensor:
    """Cross-entropy of each entry by itself, whose logit is the list's softmax; the mean over lists.

    Args:
        logits: ``[B, C]``, of `peer_logits`.
        positives: of how many first entries the label is 1; 0 of the others.
    """
    present = logits > float("-inf")
    label = (torch.arange(logits.shape[1], device=logits.device) < positives).to(logits.dtype)
    each = binary_cross_entropy_with_logits(logits.softmax(1), label.expand_as(logits), reduction="none")
    return _mean(each, present)


@full_precision
def list_divergence(target: Tensor, logits: Tensor) -> Tensor:
    """``p (log p - log q)`` of lists p = softmax(target) and q = softmax(logits), the mean over entries and lists.

    The gradient goes to both.

    Args:
        target, logits: ``[B, C]``, of `peer_logits`, with the same entries absent.
    """
    present = logits > float("-inf")
    log_p, log_q = (to_fp32(x).log_softmax(1).masked_fill(~present, 0.0) for x in (target, logits))
    return _mean(log_p.exp() * (log_p - log_q), present)


def _mean(each: Tensor, present: Tensor) -> Tensor:
    """Over the present entries of each list, and then over lists."""
    return ((each * present).sum(1) / present.sum(1)).mean()
