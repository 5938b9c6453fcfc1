"""How near the vectors of translations are, by any of BEPA's losses, over all devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from embedlab.distributed.gather import first_row, gather, gather_ids, share_of_kept
from embedlab.objectives.bilingual_nce import bilingual_nce
from embedlab.objectives.distance import cosine_distance, participation, spread, squared_distance
from embedlab.objectives.sigreg import sigreg
from embedlab.objectives.vicreg import covariance_term, variance_term

if TYPE_CHECKING:
    from embedlab.methods.bepa_config import BEPAConfig

Sides = tuple[Tensor, Tensor]


class Vectors(NamedTuple):
    """Of a batch of translations, ``[B, D]`` of each side."""

    online: Sides
    """Of the encoder that is trained."""
    predicted: Sides
    """What the predictor makes of them."""
    target: Sides
    """What the other side's prediction is held against."""
    ids: Sides | None
    """``[B]`` of each side, equal for equal texts; None: a text that comes again is a negative."""


class Alignment(NamedTuple):
    loss: Tensor
    stats: dict[str, Tensor]


def align(v: Vectors, config: BEPAConfig) -> Alignment:
    """The alignment loss, not weighted by lambda, and what shows whether it acts or collapses."""
    with torch.no_grad():
        both = torch.cat(v.online).detach()
        stats = {"spread": spread(both), "participation": participation(both)}
    if config.loss == "infonce":
        loss, more = _contrast(v, config)
        return Alignment(loss, stats | more)
    with torch.no_grad():
        cosine = cosine_similarity(v.online[0].float(), v.online[1].float()).mean()
        apart = cosine_similarity(v.online[0].float(), v.online[1].float().roll(1, 0)).mean()
        stats |= {"positive_cosine": cosine, "negative_cosine": apart}
    distance = cosine_distance if config.loss == "cosine" else squared_distance
    near = (distance(v.predicted[0], v.target[1]) + distance(v.predicted[1], v.target[0])) / 2
    if config.loss in ("mse", "cosine"):
        return Alignment(near, stats)
    # Statistics of the whole batch: each device has them all, and its share of their gradient.
    sides = [gather(z) if config.gather_negatives else z for z in v.online]
    if config.loss == "sigreg":
        normal = sigreg(torch.cat(sides), config.sigreg_slices)
        stats |= {"distance": near.detach(), "sigreg": normal.detach()}
        return Alignment(near + config.sigreg_weight * normal, stats)
    variance = (variance_term(sides[0]) + variance_term(sides[1])) / 2
    covariance = covariance_term(sides[0]) + covariance_term(sides[1])
    stats |= {"distance": near.detach(), "variance": variance.detach(), "covariance": covariance.detach()}
    a, b, c = config.vicreg_weights
    return Alignment(a * near + b * variance + c * covariance, stats)


def _contrast(v: Vectors, config: BEPAConfig) -> tuple[Tensor, dict[str, Tensor]]:
    everywhere = config.gather_negatives
    candidates = v.target
    ids = v.ids
    if everywhere:
        candidates = gather(v.target[0]), gather(v.target[1])
        ids = None if v.ids is None else (gather_ids(v.ids[0]), gather_ids(v.ids[1]))
    found = bilingual_nce(
        v.predicted,
        candidates,
        config.tau,
        offset=first_row(len(v.predicted[0])) if everywhere else 0,
        mask_self=config.mask_self,
        within_language=config.within_lang_neg,
        anchor_ids=v.ids,
        candidate_ids=ids,
    )
    loss = found.loss
    if everywhere:
        # The mean is over the anchors that all devices keep, and data-parallel gradients are averaged by device.
        loss = loss * share_of_kept(found.kept)
    stats = {
        "positive_cosine": found.positive_cosine,
        "negative_cosine": found.negative_cosine,
        "align_accuracy": found.accuracy,
    }
    return loss, stats
