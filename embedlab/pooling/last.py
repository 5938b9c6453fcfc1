"""The last token of the last layer: of a decoder the one that has seen the whole row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from embedlab.config.pooling import PoolingConfig
from embedlab.pooling.base import Marks, OneToken, last_index

if TYPE_CHECKING:
    from embedlab.config.backbone import BackboneInfo
    from embedlab.config.template import Template


@dataclass(frozen=True)
class LastConfig(PoolingConfig):
    name: str = "last"

    def check(self, info: BackboneInfo, template: Template | None, method: str) -> list[str]:
        if info.kind == "encoder":
            return [
                "pooling=last reads an encoder's final special token ([SEP]); pooling=cls or mean is usual"
            ]
        return []


class Last(OneToken):
    """The last real token, whatever the padding side."""

    name = "last"
    config_class = LastConfig

    def position(self, attention_mask: Tensor, marks: Marks) -> Tensor:
        return last_index(attention_mask)
