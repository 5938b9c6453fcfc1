"""InfoNCE between the views of a batch, over all devices: shared by one-pass and two-pass methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from embedlab.distributed.gather import first_row, gather, gather_ids
from embedlab.objectives.info_nce import Contrast, info_nce
from embedlab.objectives.pair_nce import interleave, pair_nce


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
    return contrast([anchors, positives], tau, [ids, ids], everywhere)


def contrast(
    vectors: Sequence[Tensor],
    tau: float,
    ids: Sequence[Tensor | None],
    everywhere: bool = True,
    hard_negative_weight: float = 0.0,
) -> ViewContrast:
    """The same for views of different texts, and with hard negatives.

    Args:
        vectors: ``[B, D]`` each: anchors, their positives and, where there are any, their hard negatives.
        tau: temperature.
        ids: ``[B]`` of each view, equal for equal texts; None: a text that comes again is a negative.
        everywhere: negatives from all ranks.
        hard_negative_weight: added to the logit of an anchor's own hard negative.
    """
    candidates = [gather(v) if everywhere else v for v in vectors[1:]]
    known = [gather_ids(i) if everywhere and i is not None else i for i in ids[1:]]
    c = info_nce(
        vectors[0],
        candidates[0],
        tau,
        offset=first_row(len(vectors[0])) if everywhere else 0,
        hard_negatives=candidates[1] if len(candidates) > 1 else None,
        hard_negative_weight=hard_negative_weight,
        anchor_ids=ids[0],
        candidate_ids=known[0],
        hard_negative_ids=known[1] if len(known) > 1 else None,
    )
    return _with_stats(c)


def contrast_pairs(
    vectors: Sequence[Tensor], tau: float, ids: Sequence[Tensor | None], everywhere: bool = True
) -> ViewContrast:
    """Each view against its partner and all views of the other sentences (NT-Xent).

    Args:
        vectors: ``[B, D]`` each: first and second views.
        tau: temperature.
        ids: ``[B]`` of each view, equal for equal texts; None: a text that comes again is a negative.
        everywhere: negatives from all ranks.
    """
    rows = interleave(*vectors)
    own = None if ids[0] is None or ids[1] is None else interleave(ids[0], ids[1])
    return _with_stats(
        pair_nce(
            rows,
            gather(rows) if everywhere else rows,
            tau,
            offset=first_row(len(rows)) if everywhere else 0,
            anchor_ids=own,
            candidate_ids=gather_ids(own) if everywhere and own is not None else own,
        )
    )


def _with_stats(c: Contrast) -> ViewContrast:
    stats = {
        "positive_cosine": c.positive_cosine,
        "negative_cosine": c.negative_cosine,
        "accuracy": c.accuracy,
    }
    return ViewContrast(c.loss, stats)
