"""InfoNCE between the views of a batch, over all devices: the settings and the calls that methods share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from embedlab.config.backbone import BackboneInfo
from embedlab.config.run import MethodConfig, RunConfig
from embedlab.distributed.in_batch import InBatch
from embedlab.errors import UserError
from embedlab.objectives.info_nce import info_nce
from embedlab.objectives.pair_nce import interleave, pair_nce
from embedlab.objectives.softmax import Contrast


@dataclass(frozen=True)
class ContrastConfig(MethodConfig):
    """Of a method that compares a sentence with the others of its batch."""

    tau: float = 0.05
    mask_duplicates: bool = True
    """A candidate with the anchor's or its positive's text is no negative; False as released."""
    gather_negatives: bool = True
    """Negatives from all devices; False keeps each device to its own batch."""

    def __post_init__(self) -> None:
        if not self.tau > 0:
            raise UserError("the temperature must be positive", key="method.tau", value=self.tau)

    @property
    def needs_others(self) -> bool:
        return True

    @property
    def in_batch(self) -> InBatch:
        return InBatch(self.gather_negatives, self.mask_duplicates)

    def check(self, info: BackboneInfo, run: RunConfig) -> list[str]:
        if run.data.pack is not None:
            raise UserError("contrastive views are single sentences", key="data.pack", fix="data.pack=null")
        return super().check(info, run)


def contrast(
    vectors: Sequence[Tensor],
    hashes: Sequence[Tensor | None],
    config: ContrastConfig,
    hard_negative_weight: float = 0.0,
) -> Contrast:
    """Each anchor against the positives and hard negatives of the batch; a row softmax (`info_nce`).

    Args:
        vectors: ``[B, D]`` each: anchors, their positives and, where there are any, their hard negatives.
        hashes: ``[B]`` of each view, equal for equal texts; None: a text that comes again is a negative.
        config: temperature, and which candidates there are.
        hard_negative_weight: added to the logit of an anchor's own hard negative.

    Returns:
        The mean over this rank's anchors.
    """
    batch = config.in_batch
    candidates = [batch.candidates(v) for v in vectors[1:]]
    texts = [batch.candidates(h) for h in hashes[1:]]
    return info_nce(
        vectors[0],
        candidates[0],
        config.tau,
        offset=batch.offset(vectors[0]),
        hard_negatives=candidates[1] if len(candidates) > 1 else None,
        hard_negative_weight=hard_negative_weight,
        anchor_hashes=hashes[0],
        candidate_hashes=texts[0],
        hard_negative_hashes=texts[1] if len(texts) > 1 else None,
    )


def contrast_pairs(
    vectors: Sequence[Tensor], hashes: Sequence[Tensor | None], config: ContrastConfig
) -> Contrast:
    """Each view against its partner and all views of the other sentences (NT-Xent, `pair_nce`).

    Args:
        vectors: ``[B, D]`` each: first and second views.
        hashes, config: as in `contrast`.

    Returns:
        The mean over this rank's 2B rows.
    """
    rows, texts = interleave(*vectors), interleaved_hashes(*hashes)
    return contrast_rows(rows, rows, texts, config.in_batch.candidates(texts), config)


def contrast_rows(
    anchors: Tensor,
    others: Tensor,
    hashes: Tensor | None,
    candidate_hashes: Tensor | None,
    config: ContrastConfig,
) -> Contrast:
    """`pair_nce` over all devices.

    Args:
        anchors: ``[2B, D]``, interleaved views.
        others: ``[2B, D]``, the same rows of this device by the same or another encoder.
        hashes: ``[2B]``, equal for equal texts; None: a text that comes again is a negative.
        candidate_hashes: those of all devices.
        config: temperature, and which candidates there are.

    Returns:
        The mean over this rank's rows.
    """
    batch = config.in_batch
    return pair_nce(
        anchors, batch.candidates(others), config.tau, offset=batch.offset(anchors),
        anchor_hashes=hashes, candidate_hashes=candidate_hashes,
    )  # fmt: skip


def interleaved_hashes(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """``[2B]`` of two views in the order of `interleave`; None where a text that comes again is a negative."""
    return None if first is None or second is None else interleave(first, second)
