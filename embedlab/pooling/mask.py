"""The mask token of a template in the last layer: PromptBERT's read-out (Jiang et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from embedlab.config.pooling import PoolingConfig
from embedlab.errors import UserError
from embedlab.pooling.base import Marks, OneToken, mark_index

if TYPE_CHECKING:
    from embedlab.config.backbone import BackboneInfo
    from embedlab.config.template import Template


@dataclass(frozen=True)
class MaskConfig(PoolingConfig):
    name: str = "mask"

    def check(self, info: BackboneInfo, template: Template | None, method: str) -> list[str]:
        if not info.has_mask_token:
            raise UserError(
                f"{info.model_type}'s tokenizer has no mask token to read out",
                key="pooling",
                value=self.name,
                fix="an encoder backbone, or pooling=last",
            )
        if template is None or "mask" not in template.marks:
            raise UserError(
                "there is no {mask} in the template to read out",
                key="pooling",
                value=self.name,
                fix="template=promptbert_bert, or another pooling",
            )
        return []


class Mask(OneToken):
    """The template's mask token, found by its distance from the row's end: a [MASK] in a text is no harm."""

    name = "mask"
    config_class = MaskConfig

    def position(self, attention_mask: Tensor, marks: Marks) -> Tensor:
        return mark_index(attention_mask, marks, "mask")
