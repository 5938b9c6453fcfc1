"""A moving average of the encoder beside it, as BEPA's targets and ESimCSE's queue are made by."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from embedlab.encoders.encoder import SentenceEncoder
from embedlab.engine.module import Method


class Averaging(Method):
    """A method with ``target``, a moving average of its encoder's weights, or None.

    Each update but the first begins by taking the present weights in.
    """

    target: SentenceEncoder | None
    _averaged_at = 0
    """The update whose weights the average has last taken in."""

    @property
    def keep(self) -> float:
        """What of the average an update keeps."""
        raise NotImplementedError

    def frozen(self) -> Iterator[nn.Module]:
        if self.target is not None:
            yield self.target

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        # Outside a captured step, whose warm-up must not move anything; and after the checkpoint of the update before.
        if self.target is not None and self.trainer.global_step != self._averaged_at:
            self._averaged_at = self.trainer.global_step
            average(self.target, self.encoder, self.keep)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint.setdefault("embedlab", {})["averaged_at"] = self._averaged_at

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._averaged_at = checkpoint["embedlab"]["averaged_at"]


def moving_average(encoder: SentenceEncoder) -> SentenceEncoder:
    """A frozen copy of the encoder (BYOL, Grill et al. 2020)."""
    return copied(encoder).requires_grad_(False).eval()


def copied(encoder: SentenceEncoder) -> SentenceEncoder:
    """A copy of backbone and pooling, without the language-modelling head."""
    head, encoder.backbone.head = encoder.backbone.head, None
    try:
        backbone = copy.deepcopy(encoder.backbone)
    finally:
        encoder.backbone.head = head
    return SentenceEncoder(backbone, copy.deepcopy(encoder.pooling), encoder.tokenization)


@torch.no_grad()
def average(target: SentenceEncoder, encoder: SentenceEncoder, keep: float) -> None:
    """``target = keep * target + (1 - keep) * encoder``, weight by weight."""
    present = dict(encoder.named_parameters())
    names, weights = zip(*target.named_parameters(), strict=True)
    torch._foreach_lerp_(list(weights), [present[n].detach() for n in names], 1 - keep)
