"""A target encoder that follows the trained one at a distance (BYOL, Grill et al. 2020; BEPA's first design)."""

from __future__ import annotations

import copy

import torch

from embedlab.encoders.encoder import SentenceEncoder


def moving_average(encoder: SentenceEncoder) -> SentenceEncoder:
    """A frozen copy of backbone and pooling, without the language-modelling head."""
    head, encoder.backbone.head = encoder.backbone.head, None
    try:
        backbone = copy.deepcopy(encoder.backbone)
    finally:
        encoder.backbone.head = head
    copied = SentenceEncoder(backbone, copy.deepcopy(encoder.pooling), encoder.tokenization)
    return copied.requires_grad_(False).eval()


@torch.no_grad()
def average(target: SentenceEncoder, encoder: SentenceEncoder, keep: float) -> None:
    """``target = keep * target + (1 - keep) * encoder``, weight by weight."""
    present = dict(encoder.named_parameters())
    names, weights = zip(*target.named_parameters(), strict=True)
    torch._foreach_lerp_(list(weights), [present[n].detach() for n in names], 1 - keep)
