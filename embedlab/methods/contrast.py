"""InfoNCE between two views of each sentence, over all devices: shared by one-pass and two-pass methods."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from embedlab.objectives.info_nce import info_nce
from embedlab.training.gather import gather, gather_ids, rank


class ViewContrast(NamedTuple):
    loss: Tensor
    stats: dict[str, Tensor]
    """Mean positive and negative cosine, and the share of anchors whose positive is nearest."""


def contrast_views(
    anchors: Tensor, positives: Tensor, tau: float, ids: Tensor | None = None, everywhere: bool = True
) -> ViewContrast:
    """Each anchor against the positives of the batch; a row softmax.

    Args:
        anchors: ``[B, D]`` of this rank.
        positives: ``[B, D]``; positive i belongs to anchor i.
        tau: temperature.
        ids: ``[B]``, equal for equal texts, which are then no negatives; None treats them as such.
        everywhere: negatives from all ranks.
    """
    candidates = gather(positives) if everywhere else positives
    candidate_ids = gather_ids(ids) if everywhere and ids is not None else ids
    offset = rank() * len(anchors) if everywhere else 0
    c = info_nce(anchors, candidates, tau, offset=offset, anchor_ids=ids, candidate_ids=candidate_ids)
    stats = {
        "positive_cosine": c.positive_cosine,
        "negative_cosine": c.negative_cosine,
        "accuracy": c.accuracy,
    }
    return ViewContrast(c.loss, stats)
