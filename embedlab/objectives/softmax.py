"""The softmax over in-batch candidates that every form of InfoNCE shares: which candidates count, and diagnostics."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Contrast(NamedTuple):
    """The loss and what shows whether it learns: scalars, fp32."""

    loss: Tensor
    positive_cosine: Tensor
    """Mean cosine of an anchor and its positive."""
    negative_cosine: Tensor
    """Mean cosine of an anchor and its in-batch negatives (masked candidates left out)."""
    accuracy: Tensor
    """Share of anchors whose positive is the nearest candidate."""

    @property
    def stats(self) -> dict[str, Tensor]:
        """All but the loss, by name."""
        return {name: value for name, value in self._asdict().items() if name != "loss"}


class MaskedSoftmax(NamedTuple):
    """Logits of anchors (rows) over candidates (columns), ``[R, C]``."""

    logits: Tensor
    """Cosines over the temperature; ``-inf`` where a candidate is masked."""
    cosines: Tensor
    target: Tensor
    """``[R]``, the column of each anchor's positive."""
    positive: Tensor
    """Bool; where that column is."""
    negative: Tensor
    """Bool; the candidates that are neither masked, nor positive, nor the anchor itself."""


def masked_softmax(
    cosines: Tensor,
    target: Tensor,
    tau: float,
    *,
    itself: Tensor | None = None,
    mask_self: bool = True,
    excluded: Tensor | None = None,
    bias: Tensor | None = None,
    anchor_hashes: Tensor | None = None,
    candidate_hashes: Tensor | None = None,
) -> MaskedSoftmax:
    """Logits over the candidates that count.

    Args:
        cosines: ``[R, C]``, fp32.
        target: ``[R]``, the column of each anchor's positive.
        tau: temperature.
        itself: bool ``[R, C]``, where a candidate is the anchor's own row; such a one is no negative.
        mask_self: leave it out of the denominator.
        excluded: bool ``[R, C]``, further candidates that leave the denominator.
        bias: ``[R, C]``, added to the logits.
        anchor_hashes, candidate_hashes: integers ``[R]`` and ``[C]``, equal for equal texts. A candidate with the
            anchor's or its positive's text leaves the denominator. None: it is a negative.
    """
    # Compared, not written by index: that copies the value from the host, which a CUDA graph does not allow.
    positive = torch.arange(cosines.shape[1], device=cosines.device) == target[:, None]
    present = positive if itself is None else positive | itself
    masked = torch.zeros_like(positive) if excluded is None else excluded
    if itself is not None and mask_self:
        masked = masked | itself
    if anchor_hashes is not None and candidate_hashes is not None:
        same = candidate_hashes == anchor_hashes[:, None]
        same = same | (candidate_hashes == candidate_hashes[target][:, None])
        masked = masked | (same & ~present)
    logits = (cosines / tau).masked_fill(masked, float("-inf"))
    if bias is not None:
        logits = logits + bias
    return MaskedSoftmax(logits, cosines, target, positive, ~(masked | present))


def with_diagnostics(loss: Tensor, softmax: MaskedSoftmax) -> Contrast:
    """The loss, and the mean cosines and the accuracy of what it was computed from."""
    with torch.no_grad():
        positive = (softmax.cosines * softmax.positive).sum(1).mean()
        negatives = softmax.cosines.masked_fill(~softmax.negative, 0.0)
        negative = negatives.sum() / softmax.negative.sum().clamp(min=1)
        accuracy = (softmax.logits.argmax(1) == softmax.target).float().mean()
    return Contrast(loss, positive, negative, accuracy)
