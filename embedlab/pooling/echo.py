"""Echo embeddings (arXiv 2402.15449): a decoder reads a sentence twice; the second copy, which has seen all, counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from embedlab.config.backbone import BackboneInfo
from embedlab.config.pooling import PoolingConfig
from embedlab.config.template import Template
from embedlab.errors import UserError
from embedlab.pooling.base import Marks, Pooling, mean_tokens


@dataclass(frozen=True)
class EchoConfig(PoolingConfig):
    name: str = "echo"

    @property
    def averages_tokens(self) -> bool:
        return True

    def check(self, info: BackboneInfo, template: Template | None, method: str) -> list[str]:
        if template is None or template.between is None:
            raise UserError(
                "the template has no second copy of the sentence to read out",
                key="pooling",
                value=self.name,
                fix="template=echo, or pooling=mean",
            )
        if info.kind == "encoder":
            return ["pooling=echo: an encoder's first copy has seen the whole sentence too (pooling=mean)"]
        return []


def second_copy(attention_mask: Tensor, marks: Marks) -> Tensor:
    """The mask ``[B, L]`` of the tokens of each row's second copy of its sentence."""
    frame: Any = marks.frame  # type: ignore[attr-defined]
    mask = attention_mask.long()
    number, total = mask.cumsum(1), mask.sum(1, keepdim=True)
    length = (total - frame.before - frame.between - frame.after) // 2
    end = total - frame.after
    return mask * ((number > end - length) & (number <= end))


class Echo(Pooling):
    """The mean of the last layer over the second copy alone: not its template, nor special tokens."""

    config_class = EchoConfig

    def forward(self, hidden: tuple[Tensor, ...], attention_mask: Tensor, marks: Marks) -> Tensor:
        return mean_tokens(hidden[-1], second_copy(attention_mask, marks))
