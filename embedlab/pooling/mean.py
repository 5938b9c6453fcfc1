"""Means over the real tokens, special tokens and template included: of the last layer, or of the first and the last."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from embedlab.config.backbone import BackboneInfo
from embedlab.config.pooling import PoolingConfig
from embedlab.config.template import Template
from embedlab.pooling.base import Marks, Pooling, mean_tokens


@dataclass(frozen=True)
class MeanConfig(PoolingConfig):
    name: str = "mean"
    stock_mode = "mean"

    @property
    def averages_tokens(self) -> bool:
        return True


class Mean(Pooling):
    """The mean of the last layer."""

    config_class = MeanConfig

    def forward(self, hidden: tuple[Tensor, ...], attention_mask: Tensor, marks: Marks) -> Tensor:
        return mean_tokens(hidden[-1], attention_mask)


@dataclass(frozen=True)
class FirstLastConfig(MeanConfig):
    """Which layer is first: hidden state 1, the output of the first block.

    Taking the embedding layer (hidden state 0) for it is another read-out: the two are four points apart on
    BERT-base (56.70 and 60.73, SimCSE issue 285).
    """

    name: str = "first_last"
    embeddings: bool = False
    """Layers 0 and L instead of 1 and L."""

    def check(self, info: BackboneInfo, template: Template | None, method: str) -> list[str]:
        self.check_widths(info)
        return []


class FirstLast(Pooling):
    """(mean of layer 1 + mean of layer L) / 2 (Su et al. 2021, whitening; SimCSE's table 5 baseline)."""

    config_class = FirstLastConfig
    needs_all_layers = True
    config: FirstLastConfig

    def forward(self, hidden: tuple[Tensor, ...], attention_mask: Tensor, marks: Marks) -> Tensor:
        first = hidden[0 if self.config.embeddings else 1]
        return (mean_tokens(first, attention_mask) + mean_tokens(hidden[-1], attention_mask)) / 2
