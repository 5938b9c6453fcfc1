"""Poolings that read one token of the last layer: the first, the last, or the mask of a template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from embedlab.config.backbone import BackboneInfo
from embedlab.config.pooling import PoolingConfig
from embedlab.config.template import Template
from embedlab.objectives.precision import to_fp32
from embedlab.pooling.base import Marks, Pooling, Token, check_token, token_at, token_index


@dataclass(frozen=True)
class OneTokenConfig(PoolingConfig):
    """Of a pooling that reads ``token``."""

    token: ClassVar[Token]

    def check(self, info: BackboneInfo, template: Template | None, method: str) -> list[str]:
        check_token(self.token, info, template, "pooling", self.name)
        return []


@dataclass(frozen=True)
class ClsConfig(OneTokenConfig):
    name: str = "cls"
    token = "cls"
    stock_mode = "cls"


@dataclass(frozen=True)
class ClsMlpConfig(ClsConfig):
    name: str = "cls_mlp"
    has_head = True


@dataclass(frozen=True)
class LastConfig(OneTokenConfig):
    name: str = "last"
    token = "last"
    stock_mode = "lasttoken"

    def check(self, info: BackboneInfo, template: Template | None, method: str) -> list[str]:
        if info.kind == "encoder":
            return [
                "pooling=last reads an encoder's final special token ([SEP]); pooling=cls or mean is usual"
            ]
        return []


@dataclass(frozen=True)
class MaskConfig(OneTokenConfig):
    name: str = "mask"
    token = "mask"


def new_dense(width: int, generator: torch.Generator | None = None) -> nn.Linear:
    """A layer of equal widths with Hugging Face's initialisation: N(0, 0.02) and zero bias."""
    layer = nn.Linear(width, width)
    nn.init.normal_(layer.weight, std=0.02, generator=generator)
    nn.init.zeros_(layer.bias)
    return layer


class OneToken(Pooling):
    """The last layer at one token."""

    config: OneTokenConfig

    def position(self, attention_mask: Tensor, marks: Marks) -> Tensor:
        return token_index(attention_mask, marks, self.config.token)

    def forward(self, hidden: tuple[Tensor, ...], attention_mask: Tensor, marks: Marks) -> Tensor:
        """As of any pooling; a last layer of one position a row, [B, 1, D], is that of the token at `position`."""
        if hidden[-1].shape[1] == 1:
            return to_fp32(hidden[-1][:, 0])
        return token_at(hidden[-1], self.position(attention_mask, marks))


class Cls(OneToken):
    """The first real token: BERT's [CLS]."""

    config_class = ClsConfig


class ClsMlp(OneToken):
    """tanh(W h_cls + b), W [D, D]: supervised SimCSE's head, kept at inference.

    Its weights are saved with the encoder. (Unsupervised SimCSE's head exists in training only: that one is the
    method's, ``method.mlp=train``.)
    """

    config_class = ClsMlpConfig

    def __init__(self, config: PoolingConfig, info: BackboneInfo) -> None:
        super().__init__(config, info)
        self.linear = new_dense(info.width)

    def forward(self, hidden: tuple[Tensor, ...], attention_mask: Tensor, marks: Marks) -> Tensor:
        vectors = super().forward(hidden, attention_mask, marks)
        dtype = torch.promote_types(vectors.dtype, self.linear.weight.dtype)
        with torch.autocast(vectors.device.type, enabled=False):
            weight, bias = self.linear.weight.to(dtype), self.linear.bias.to(dtype)
            return torch.tanh(nn.functional.linear(vectors.to(dtype), weight, bias))


class Last(OneToken):
    """The last real token: of a decoder the one that has seen the whole row."""

    config_class = LastConfig


class Mask(OneToken):
    """The template's mask token: PromptBERT's read-out (Jiang et al. 2022)."""

    config_class = MaskConfig
