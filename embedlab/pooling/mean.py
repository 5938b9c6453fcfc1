"""Means over the real tokens, special tokens and template included: of the last layer, or of the first and the last."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from embedlab.backbones.architecture import check_layer_states
from embedlab.config.backbone import BackboneInfo
from embedlab.config.pooling import PoolingConfig
from embedlab.config.template import Template
from embedlab.kernels.packed_rows import PackedRows
from embedlab.pooling.base import Marks, Pooling, mean_packed, mean_tokens


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

    def packed(self, hidden: tuple[Tensor, ...], rows: PackedRows, marks: Marks) -> Tensor:
        return mean_packed(hidden[-1], rows)


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
        check_layer_states(info.model_type)
        self.check_widths(info)
        return []


class FirstLast(Pooling):
    """(mean of layer 1 + mean of layer L) / 2 (Su et al. 2021, whitening; SimCSE's table 5 baseline)."""

    config_class = FirstLastConfig
    needs_all_layers = True
    config: FirstLastConfig

    def forward(self, hidden: tuple[Tensor, ...], attention_mask: Tensor, marks: Marks) -> Tensor:
        return (
            mean_tokens(self._first(hidden), attention_mask) + mean_tokens(hidden[-1], attention_mask)
        ) / 2

    def packed(self, hidden: tuple[Tensor, ...], rows: PackedRows, marks: Marks) -> Tensor:
        return (mean_packed(self._first(hidden), rows) + mean_packed(hidden[-1], rows)) / 2

    def _first(self, hidden: tuple[Tensor, ...]) -> Tensor:
        return hidden[0 if self.config.embeddings else 1]
