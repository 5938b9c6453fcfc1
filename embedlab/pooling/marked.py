"""Poolings that read a template's marks: the end of its first stage, of its second, or both (CSE-SFP)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from embedlab.config.backbone import BackboneInfo
from embedlab.config.pooling import PoolingConfig
from embedlab.config.template import Template
from embedlab.errors import UserError
from embedlab.objectives.precision import to_fp32
from embedlab.pooling.base import Marks, Pooling, mark_index, token_at


def up_to(attention_mask: Tensor, marks: Marks, mark: str) -> Tensor:
    """The attention mask ``[B, L]`` with what stands after a mark left out."""
    positions = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    return attention_mask * (positions <= mark_index(attention_mask, marks, mark)[:, None])


@dataclass(frozen=True)
class MarkedConfig(PoolingConfig):
    """Of a pooling that reads the marks in ``reads``."""

    name: str
    reads: ClassVar[tuple[str, ...]] = ()

    def check(self, info: BackboneInfo, template: Template | None, method: str) -> list[str]:
        missing = [m for m in self.reads if template is None or m not in template.marks]
        if missing:
            raise UserError(
                f"this pooling reads the mark {{{missing[0]}}}, which the template does not have",
                key="pooling",
                value=self.name,
                fix="template=eol_sum, or pooling=last",
            )
        if info.kind == "encoder":
            return [
                f"pooling={self.name} reads a token of the prompt, which an encoder has not learnt to fill "
                "with what stands before it (pooling=mean or mask is usual)"
            ]
        return []


@dataclass(frozen=True)
class Rep1Config(MarkedConfig):
    name: str = "rep1"
    reads = ("rep1",)


@dataclass(frozen=True)
class Rep2Config(MarkedConfig):
    name: str = "rep2"
    reads = ("rep2",)


@dataclass(frozen=True)
class RepMeanConfig(MarkedConfig):
    name: str = "rep_mean"
    reads = ("rep1", "rep2")


@dataclass(frozen=True)
class RepConcatConfig(RepMeanConfig):
    name: str = "rep_concat"


class Marked(Pooling):
    """The last layer at the marked token."""

    config: MarkedConfig

    def position(self, attention_mask: Tensor, marks: Marks) -> Tensor | None:
        reads = self.config.reads
        return mark_index(attention_mask, marks, reads[0]) if len(reads) == 1 else None

    def forward(self, hidden: tuple[Tensor, ...], attention_mask: Tensor, marks: Marks) -> Tensor:
        """As of any pooling; a last layer of one position a row, [B, 1, D], is that of the token at `position`."""
        if hidden[-1].shape[1] == 1:
            return to_fp32(hidden[-1][:, 0])
        return self.at(hidden, attention_mask, marks, self.config.reads[0])

    def at(self, hidden: tuple[Tensor, ...], attention_mask: Tensor, marks: Marks, mark: str) -> Tensor:
        return token_at(hidden[-1], mark_index(attention_mask, marks, mark))

    def both(self, hidden: tuple[Tensor, ...], attention_mask: Tensor, marks: Marks) -> list[Tensor]:
        """Rep2 and Rep1, each at unit length."""
        return [normalize(self.at(hidden, attention_mask, marks, m), dim=-1) for m in ("rep2", "rep1")]


class Rep1(Marked):
    """The end of the first stage."""

    config_class = Rep1Config


class Rep2(Marked):
    """The end of the second stage: CSE-SFP's embedding."""

    config_class = Rep2Config


class RepMean(Marked):
    """The mean of both, each at unit length."""

    config_class = RepMeanConfig

    def forward(self, hidden: tuple[Tensor, ...], attention_mask: Tensor, marks: Marks) -> Tensor:
        rep2, rep1 = self.both(hidden, attention_mask, marks)
        return (rep2 + rep1) / 2


class RepConcat(Marked):
    """Rep2 and Rep1 side by side, each at unit length: twice the width; its cosine is the mean of both's."""

    config_class = RepConcatConfig

    def __init__(self, config: PoolingConfig, info: BackboneInfo) -> None:
        super().__init__(config, info)
        self.dim = 2 * info.width

    def forward(self, hidden: tuple[Tensor, ...], attention_mask: Tensor, marks: Marks) -> Tensor:
        return torch.cat(self.both(hidden, attention_mask, marks), dim=-1)
