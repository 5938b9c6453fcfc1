"""The first token of the last layer: BERT's [CLS]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from embedlab.config.pooling import PoolingConfig
from embedlab.errors import UserError
from embedlab.pooling.base import Marks, OneToken, first_index

if TYPE_CHECKING:
    from embedlab.config.backbone import BackboneInfo
    from embedlab.config.template import Template


@dataclass(frozen=True)
class ClsConfig(PoolingConfig):
    name: str = "cls"

    def check(self, info: BackboneInfo, template: Template | None, method: str) -> list[str]:
        if info.kind == "decoder":
            raise UserError(
                "the first token of a decoder has seen nothing of the sentence",
                key="pooling",
                value=self.name,
                fix="pooling=last or pooling=mean",
            )
        return []


class Cls(OneToken):
    """The first real token, whatever the padding side."""

    name = "cls"
    config_class = ClsConfig

    def position(self, attention_mask: Tensor, marks: Marks) -> Tensor:
        return first_index(attention_mask)
