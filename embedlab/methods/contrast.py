"""InfoNCE between the views of a batch, over all devices: the settings and the calls that methods share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from embedlab.config.run import MethodConfig
from embedlab.distributed.in_batch import InBatch
from embedlab.errors import UserError
from embedlab.objectives.info_nce import info_nce
from embedlab.objectives.pair_nce import interleave, pair_nce
from embedlab.objectives.softmax import Contrast

if TYPE_CHECKING:
    from embedlab.config.backbone import BackboneInfo
    from embedlab.config.run import RunConfig


@dataclass(frozen=True)
class ContrastConfig(MethodConfig):
    """Of a method that compares a sentence with the others of its batch."""

    tau: float = 0.05
    mask_duplicates: bool = True
    """A candidate with the anchor's or its positive's text is no negative; False as released."""
    gather_negatives: bool = True
    """Negatives from all devices; False keeps each device to its own batch."""

    @property
    def needs_others(self) -> bool:
        return True

    @property
    def in_batch(self) -> InBatch:
        return InBatch(self.gather_negatives, self.mask_duplicates)

    def check(self, info: BackboneInfo, run: RunConfig) -> list[str]:
        if not self.tau > 0:
            raise UserError("the temperature must be positive", key="method.tau", value=self.tau)
        if run.data.pack is not None:
            raise UserError("contrastive views are single sentences", key="data.pack", fix="data.pack=null")
        return []


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
    batch, rows = config.in_batch, interleave(*vectors)
    texts = None if hashes[0] is None or hashes[1] is None else interleave(hashes[0], hashes[1])
    return pair_nce(
        rows,
        batch.candidates(rows),
        config.tau,
        offset=batch.offset(rows),
        anchor_hashes=texts,
        candidate_hashes=batch.candidates(texts),
    )
