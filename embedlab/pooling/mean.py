"""The mean over the real tokens of the last layer, special tokens and template included."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from embedlab.config.pooling import PoolingConfig
from embedlab.pooling.base import Marks, Pooling, mean_tokens


@dataclass(frozen=True)
class MeanConfig(PoolingConfig):
    name: str = "mean"


class Mean(Pooling):
    """Masked mean."""

    name = "mean"
    config_class = MeanConfig

    def forward(self, hidden: tuple[Tensor, ...], attention_mask: Tensor, marks: Marks) -> Tensor:
        return mean_tokens(hidden[-1], attention_mask)
