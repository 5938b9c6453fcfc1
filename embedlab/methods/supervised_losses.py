"""What the objectives of `embedlab.methods.supervised` make of the vectors of a batch, over all devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from embedlab.config.build import within
from embedlab.distributed.gather import share_of_kept
from embedlab.engine.module import Batch, LossOutput
from embedlab.methods.contrast import ContrastConfig, contrast, contrast_pairs
from embedlab.objectives.cosent import angle_similarity, cosine, ranking
from embedlab.objectives.directions import Directions, Hardness, directed_nce
from embedlab.objectives.gist import gist
from embedlab.objectives.multi_positive import multi_positive
from embedlab.objectives.sigmoid import sigmoid
from embedlab.objectives.softmax import Contrast
from embedlab.objectives.teacher_scores import listed_scores, margin_mse, score_kl


@dataclass(frozen=True)
class LossConfig(ContrastConfig):
    """What the objectives have to be told."""

    tau: float | None = within(None, above=0)  # type: ignore[assignment]
    """Of the objectives with a softmax; None: 0.05, of gist 0.01."""
    hard_negative_weight: float = 0.0
    """in_batch: added to the logit of an anchor's own hard negatives."""
    directions: Directions = "forward"
    """in_batch: from anchors to documents; ``symmetric``, and back; ``joint``, to all other texts in one softmax."""
    hardness: Hardness | None = None
    """in_batch: who weighs more the nearer it is: texts of others (``in_batch``), own negatives (``hard``), ``all``."""
    hardness_strength: float = 9.0
    """How much: added to a logit for each unit of its cosine."""
    scale: float = within(20.0, above=0)
    """cosent, angle: what similarities are multiplied by."""
    cosent_weight: float = within(0.0, least=0)
    """angle: weights of its three terms, those of its release."""
    in_batch_weight: float = within(1.0, least=0)
    angle_weight: float = within(0.02, least=0)
    positive_from: float = 1.0
    """angle, on scored pairs: the least score of a positive of the in-batch term."""
    guide: str | None = None
    """gist: the encoder that says which candidates are no negatives; what `embedlab.load` takes."""
    cached: bool = False
    """The guide's vectors are computed once, before the first step, and kept in half precision; False: in each step
    anew."""
    margin: float = 0.0
    margin_kind: Literal["absolute", "relative"] = "absolute"
    anchors: bool = True
    """gist: whether other anchors are candidates of an anchor."""
    positives: bool = True
    """gist: whether a positive is compared with the other positives."""
    score_scale: float | None = within(None, above=0)
    """margin_mse, kl: a student's score is its cosine times this; None: the dot product."""
    temperature: float = within(1.0, above=0)
    """kl: of teacher and student."""
    add_in_batch: bool = False
    """margin_mse, kl: whether the in-batch loss is added, as FlagEmbedding does."""


@dataclass(frozen=True)
class Step:
    """One batch.

    Args:
        config: of the method, with the temperature of its objective and the dims of this step.
        z: vectors ``[B, D]`` of each view: anchor and positive, then the negatives; or first and second; or the text.
        texts: hashes ``[B]`` of each view's texts, equal for equal ones.
        batch: its numbers, by name.
        guide: the guide's vectors ``[B, G]`` of each view.
        sigmoid: logarithm of the scale, and bias, where they are learned.
    """

    config: LossConfig
    z: list[Tensor]
    texts: list[Tensor]
    batch: Batch
    guide: Callable[[], list[Tensor]]
    sigmoid: tuple[Tensor, ...]

    @property
    def tau(self) -> float:
        """The temperature of the objective."""
        assert self.config.tau is not None
        return self.config.tau

    @property
    def hashes(self) -> Sequence[Tensor | None]:
        """Those by which texts that come again are known; None where they are negatives."""
        return self.texts if self.config.mask_duplicates else [None] * len(self.texts)

    @property
    def offset(self) -> int:
        return self.config.in_batch.offset(self.z[0])

    def gathered(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [self.config.in_batch.candidates(part) for part in parts]


def in_batch(step: Step) -> LossOutput:
    config, n = step.config, len(step.z)
    if config.directions == "forward" and config.hardness is None:
        result = contrast(step.z, step.hashes, config, config.hard_negative_weight)
        return LossOutput({"info_nce": result.loss}, result.stats)
    known = step.gathered(step.texts) if config.mask_duplicates else None

    def objective(*vectors: Tensor) -> Contrast:
        return directed_nce(
            vectors[:n], vectors[n:], step.tau, directions=config.directions, hardness=config.hardness,
            strength=config.hardness_strength, offset=step.offset, hashes=step.texts, candidate_hashes=known,
        )  # fmt: skip

    result = config.matryoshka(objective, *step.z, *step.gathered(step.z))
    return LossOutput({"info_nce": result.loss}, result.stats)


def cosent(step: Step) -> LossOutput:
    loss = _ranked(step, cosine, [(0, 1)], [step.batch["score"]])
    return LossOutput({"cosent": loss}, _mean_cosine(step))


def angle(step: Step) -> LossOutput:
    """The three terms of AnglE's release; on triplets the second is the mean of InfoNCE without and with negatives."""
    config, first = step.config, step.z[0]
    if len(step.z) == 2:  # not by its score: a batch of a mix has the numbers of all its sets
        pairs, scores = [(0, 1)], [step.batch["score"]]
        kept = scores[0] >= config.positive_from
        result = contrast_pairs(step.z, step.hashes, config, kept)
        near = result.loss
    else:
        pairs = [(0, k) for k in range(1, len(step.z))]
        scores = [torch.full_like(first[:, 0], float(k == 1), dtype=torch.float32) for _, k in pairs]
        plain = contrast(step.z[:2], step.hashes[:2], config)
        result = contrast(step.z, step.hashes, config)
        near = (plain.loss + result.loss) / 2
    losses = {"in_batch": config.in_batch_weight * near}
    losses["angle"] = config.angle_weight * _ranked(step, angle_similarity, pairs, scores)
    if config.cosent_weight != 0:
        losses["cosent"] = config.cosent_weight * _ranked(step, cosine, pairs, scores)
    return LossOutput(losses, result.stats)


def guided(step: Step) -> LossOutput:
    config, guide = step.config, step.guide()
    n, guide_candidates = len(step.z), step.gathered(guide)
    known = step.gathered(step.texts) if config.mask_duplicates else None

    def objective(*vectors: Tensor) -> Contrast:
        return gist(
            vectors[:n], vectors[n:], guide, guide_candidates, step.tau,
            offset=step.offset, margin=config.margin, margin_kind=config.margin_kind,
            anchors=config.anchors, positives=config.positives, hashes=step.texts, candidate_hashes=known,
        )  # fmt: skip

    result = config.matryoshka(objective, *step.z, *step.gathered(step.z))
    return LossOutput({"gist": result.loss}, result.stats)


def several_positives(step: Step) -> LossOutput:
    """Of a text with a label the others of the label; of a pair all positives of the anchor's text."""
    alone = len(step.z) == 1
    labels = step.batch["label"] if alone else step.texts[0]
    candidates, candidate_labels = step.gathered([step.z[-1], labels])
    row = torch.arange(len(labels), device=labels.device) + step.offset
    itself = torch.arange(len(candidates), device=row.device) == row[:, None] if alone else None
    excluded = None
    if step.config.mask_duplicates:
        (known,) = step.gathered(step.texts[-1:])
        excluded = (step.texts[0][:, None] == known) | (step.texts[-1][:, None] == known)
    counts: list[Tensor] = []

    def objective(anchors: Tensor, others: Tensor) -> Contrast:
        result, count = multi_positive(
            anchors, others, labels, candidate_labels, step.tau, itself=itself, excluded=excluded
        )
        counts.append(count)
        return result

    result = step.config.matryoshka(objective, step.z[0], candidates)
    # The mean is over the anchors that all devices keep, and data-parallel gradients are averaged by device.
    return LossOutput({"multi_positive": result.loss * share_of_kept(counts[0])}, result.stats)


def pairwise_sigmoid(step: Step) -> LossOutput:
    candidates = torch.cat(step.gathered(step.z[1:]))
    excluded = None
    if step.config.mask_duplicates:
        known = torch.cat(step.gathered(step.texts[1:]))
        excluded = (step.texts[0][:, None] == known) | (step.texts[1][:, None] == known)

    def objective(anchors: Tensor, others: Tensor) -> Contrast:
        return sigmoid(anchors, others, *step.sigmoid, offset=step.offset, excluded=excluded)

    result = step.config.matryoshka(objective, step.z[0], candidates)
    return LossOutput({"sigmoid": result.loss}, result.stats)


def margins(step: Step) -> LossOutput:
    return _distilled(step, "margin_mse", margin_mse)


def distribution(step: Step) -> LossOutput:
    def loss(student: Tensor, teacher: Tensor) -> Tensor:
        return score_kl(student, teacher, step.config.temperature)

    return _distilled(step, "kl", loss)


def _distilled(step: Step, name: str, objective: Callable[[Tensor, Tensor], Tensor]) -> LossOutput:
    config = step.config
    teacher = torch.stack([step.batch[f"score_{k}"] for k in range(len(step.z) - 1)], 1)
    scale = config.score_scale

    def loss(anchors: Tensor, *listed: Tensor) -> Tensor:
        student = listed_scores(anchors, torch.stack(listed), normalise=scale is not None)
        return objective(student if scale is None else scale * student, teacher)

    losses = {name: config.matryoshka(loss, *step.z)}
    if config.add_in_batch:
        result = contrast(step.z, step.hashes, config)
        return LossOutput({**losses, "info_nce": result.loss}, result.stats)
    return LossOutput(losses, _mean_cosine(step))


def _ranked(
    step: Step,
    similarity: Callable[[Tensor, Tensor], Tensor],
    pairs: Sequence[tuple[int, int]],
    scores: Sequence[Tensor],
) -> Tensor:
    """The ranking of these pairs of views, of all devices, by their scores ``[B]``."""
    known = torch.cat(step.gathered(scores))

    def loss(*vectors: Tensor) -> Tensor:
        found = step.gathered([similarity(vectors[i], vectors[k]) for i, k in pairs])
        return ranking(torch.cat(found), known, step.config.scale)

    return step.config.matryoshka(loss, *step.z)


def _mean_cosine(step: Step) -> dict[str, Tensor]:
    with torch.no_grad():
        return {"positive_cosine": cosine(step.z[0], step.z[1]).mean()}


OBJECTIVES: dict[str, Callable[[Step], LossOutput]] = {
    "in_batch": in_batch,
    "cosent": cosent,
    "angle": angle,
    "gist": guided,
    "multi_positive": several_positives,
    "sigmoid": pairwise_sigmoid,
    "margin_mse": margins,
    "kl": distribution,
}
