"""How near the vectors of translations are, by any of BEPA's losses, over all devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from embedlab.config.backbone import BackboneInfo
from embedlab.config.build import within
from embedlab.config.run import RunConfig
from embedlab.distributed.gather import share_of_kept
from embedlab.errors import UserError
from embedlab.methods.contrast import ContrastConfig
from embedlab.objectives.bilingual_nce import bilingual_nce
from embedlab.objectives.regularisers import (
    cosine_distance,
    covariance_term,
    participation,
    sigreg,
    squared_distance,
    std,
    variance_term,
)
from embedlab.objectives.softmax import Contrast

Sides = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class AlignmentConfig(ContrastConfig):
    loss: Literal["infonce", "mse", "cosine", "vicreg", "sigreg"] = "infonce"
    tau: float = within(0.07, above=0)
    """Temperature of infonce."""
    mask_self: bool = True
    """An anchor is no candidate of its own; False as released."""
    within_lang_neg: bool = True
    """Candidates of the anchor's own side are negatives too."""
    gather_negatives: bool = True
    """Negatives (and the statistics of vicreg and sigreg) from all devices; False keeps each to its own batch."""
    vicreg_weights: tuple[float, float, float] = (25.0, 25.0, 1.0)
    """Of the squared distance, the variance and the covariance term."""
    sigreg_weight: float = within(0.1, least=0)
    """Of SIGReg beside the squared distance."""
    sigreg_slices: int = within(256, least=1)
    """Random directions on which SIGReg tests for a normal distribution."""

    @property
    def nests(self) -> bool:
        return self.loss == "infonce"

    def check(self, info: BackboneInfo, run: RunConfig) -> list[str]:
        if not all(w >= 0 for w in self.vicreg_weights):
            raise UserError(
                "three weights from 0 on", key="method.vicreg_weights", value=self.vicreg_weights,
                fix="method.vicreg_weights=[25,25,1]",
            )  # fmt: skip
        if self.loss != "sigreg":
            why = f"method.loss={self.loss} does not read it"
            self.refuse_unread("sigreg_weight sigreg_slices", why, "method.loss=sigreg")
        return super().check(info, run)


class Vectors(NamedTuple):
    """Of a batch of translations, ``[B, D]`` of each side."""

    online: Sides
    """Of the encoder that is trained."""
    predicted: Sides
    """What the predictor makes of them."""
    target: Sides
    """What the other side's prediction is held against."""
    hashes: Sides | None
    """``[B]`` of each side, equal for equal texts; None: a text that comes again is a negative."""


def align(v: Vectors, config: AlignmentConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """The alignment loss, not weighted by lambda, and what shows whether it acts or collapses."""
    with torch.no_grad():
        both = torch.cat(v.online).detach()
        stats = {"spread": std(both), "participation": participation(both)}
    if config.loss == "infonce":
        return _contrast(v, config, stats)
    with torch.no_grad():
        cosine = cosine_similarity(v.online[0].float(), v.online[1].float()).mean()
        apart = cosine_similarity(v.online[0].float(), v.online[1].float().roll(1, 0)).mean()
        stats |= {"positive_cosine": cosine, "negative_cosine": apart}
    distance = cosine_distance if config.loss == "cosine" else squared_distance
    near = (distance(v.predicted[0], v.target[1]) + distance(v.predicted[1], v.target[0])) / 2
    if config.loss in ("mse", "cosine"):
        return near, stats
    # Statistics of the whole batch: each device has them all, and its share of their gradient.
    sides = [config.in_batch.candidates(z) for z in v.online]
    if config.loss == "sigreg":
        normal = sigreg(torch.cat(sides), config.sigreg_slices)
        stats |= {"distance": near.detach(), "sigreg": normal.detach()}
        return near + config.sigreg_weight * normal, stats
    variance = (variance_term(sides[0]) + variance_term(sides[1])) / 2
    covariance = covariance_term(sides[0]) + covariance_term(sides[1])
    stats |= {"distance": near.detach(), "variance": variance.detach(), "covariance": covariance.detach()}
    a, b, c = config.vicreg_weights
    return a * near + b * variance + c * covariance, stats


def _contrast(
    v: Vectors, config: AlignmentConfig, stats: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    batch = config.in_batch
    candidates = batch.candidates(v.target[0]), batch.candidates(v.target[1])
    known = None if v.hashes is None else (batch.candidates(v.hashes[0]), batch.candidates(v.hashes[1]))
    counts: list[Tensor] = []

    def objective(first: Tensor, second: Tensor, *others: Tensor) -> Contrast:
        found, count = bilingual_nce(
            (first, second),
            (others[0], others[1]),
            config.tau,
            offset=batch.offset(first),
            mask_self=config.mask_self,
            within_language=config.within_lang_neg,
            anchor_hashes=v.hashes,
            candidate_hashes=known,
        )
        counts.append(count)
        return found

    contrast = config.matryoshka(objective, *v.predicted, *candidates)
    loss, more = contrast.loss, contrast.stats
    if batch.gather_negatives:
        # The mean is over the anchors that all devices keep, and data-parallel gradients are averaged by device.
        loss = loss * share_of_kept(counts[0])
    more["align_accuracy"] = more.pop("accuracy")
    return loss, stats | more
