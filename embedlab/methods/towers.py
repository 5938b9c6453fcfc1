"""BERT's pooler, dense + tanh on the sentence vector: JTCSE's modulus is that of its output."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from embedlab.errors import UserError

if TYPE_CHECKING:
    from embedlab.backbones import BackboneConfig

log = logging.getLogger(__name__)


def tower_pooler(sources: Sequence[BackboneConfig], width: int, seed: int) -> nn.Module:
    """The pooler of the first source that has one of this width, else a new one.

    Args:
        sources: checkpoints to look in.
        width: of the vectors that it takes.
        seed: of a new one's weights, N(0, 0.02) with zero bias as in Hugging Face models.
    """
    from embedlab.backbones import load_pooler

    for source in sources:
        try:
            found = load_pooler(source)
        except UserError as error:  # such as a hub that cannot be reached, when the towers are on the disk
            log.info("No pooler from %s: %s", source.label, error)
            continue
        if found is not None and found[0].in_features == width:  # type: ignore[index,union-attr]
            log.info("Pooler of %s.", source.label)
            return found.float()
    log.info("A new pooler, seed %d.", seed)
    dense = nn.Linear(width, width)
    with torch.no_grad():
        dense.weight.normal_(0.0, 0.02, generator=torch.Generator().manual_seed(seed))
        dense.bias.zero_()
    return nn.Sequential(dense, nn.Tanh())
