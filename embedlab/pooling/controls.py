"""What a gate over blocks is held against: their average, and mixes that do not look at the sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from embedlab.config.backbone import BackboneInfo
from embedlab.config.pooling import PoolingConfig
from embedlab.pooling.base import Marks
from embedlab.pooling.blocks import Blocks, BlocksConfig


@dataclass(frozen=True)
class LastNConfig(BlocksConfig):
    name: str = "last_n"


class LastN(Blocks):
    """The plain average of the last n blocks (S2Sent's Last-n Avg)."""

    config_class = LastNConfig

    def forward(self, hidden: tuple[Tensor, ...], attention_mask: Tensor, marks: Marks) -> Tensor:
        return self.read_blocks(hidden, attention_mask, marks).mean(0)


@dataclass(frozen=True)
class ScalarMixConfig(BlocksConfig):
    name: str = "scalar_mix"


class ScalarMix(Blocks):
    """A learned weight for each block, the same for all sentences: n parameters (ELMo, Peters et al. 2018).

    The weights are a soft-max and begin equal. ELMo's common scale is left out, as a cosine does not see it.
    """

    config_class: ClassVar[type[PoolingConfig]] = ScalarMixConfig

    def __init__(self, config: PoolingConfig, info: BackboneInfo) -> None:
        super().__init__(config, info)
        self.logits = nn.Parameter(torch.zeros(self.config.n, *self._features(info)))

    def _features(self, info: BackboneInfo) -> tuple[int, ...]:
        return (1,)

    def forward(self, hidden: tuple[Tensor, ...], attention_mask: Tensor, marks: Marks) -> Tensor:
        vectors = self.read_blocks(hidden, attention_mask, marks)
        weights = torch.softmax(self.logits.to(vectors.dtype), 0)
        return (weights[:, None] * vectors).sum(0)


@dataclass(frozen=True)
class FeatureMixConfig(BlocksConfig):
    name: str = "feature_mix"


class FeatureMix(ScalarMix):
    """A learned weight for each block and feature, the same for all sentences: n D parameters.

    All that S2Sent has but the sentence's say in it.
    """

    config_class = FeatureMixConfig

    def _features(self, info: BackboneInfo) -> tuple[int, ...]:
        return (info.width,)
