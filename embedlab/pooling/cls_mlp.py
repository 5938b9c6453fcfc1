"""The first token through Linear + tanh: supervised SimCSE's head, which is kept at inference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from embedlab.config.pooling import PoolingConfig
from embedlab.pooling.base import Marks
from embedlab.pooling.cls import Cls, ClsConfig

if TYPE_CHECKING:
    from embedlab.config.backbone import BackboneInfo


@dataclass(frozen=True)
class ClsMlpConfig(ClsConfig):
    name: str = "cls_mlp"


class ClsMlp(Cls):
    """tanh(W h_cls + b), W [D, D]; initialised as Hugging Face does, N(0, 0.02) and zero bias.

    Its weights are part of the encoder and saved with it. (Unsupervised SimCSE's head exists in training
    only: that one is the method's, ``method.mlp=train``.)
    """

    name = "cls_mlp"
    config_class = ClsMlpConfig

    def __init__(self, config: PoolingConfig, info: BackboneInfo) -> None:
        super().__init__(config, info)
        self.linear = nn.Linear(info.width, info.width)
        nn.init.normal_(self.linear.weight, std=0.02)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: tuple[Tensor, ...], attention_mask: Tensor, marks: Marks) -> Tensor:
        vectors = super().forward(hidden, attention_mask, marks)
        dtype = torch.promote_types(vectors.dtype, self.linear.weight.dtype)
        with torch.autocast(vectors.device.type, enabled=False):
            weight, bias = self.linear.weight.to(dtype), self.linear.bias.to(dtype)
            return torch.tanh(nn.functional.linear(vectors.to(dtype), weight, bias))
