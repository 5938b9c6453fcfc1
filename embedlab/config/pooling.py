"""What the settings of every pooling share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from embedlab.config.backbone import BackboneInfo
from embedlab.config.template import Template
from embedlab.errors import UserError


@dataclass(frozen=True)
class PoolingConfig:
    """Settings of a pooling. They are saved with an encoder, so that scoring never guesses them."""

    stock_mode: ClassVar[str | None] = None
    """What sentence-transformers' own Pooling calls the reading of tokens that is meant; None: it has none like it."""
    has_head: ClassVar[bool] = False
    """Whether a dense layer with tanh is part of it."""

    name: str

    @property
    def averages_tokens(self) -> bool:
        """Whether a vector is of all tokens, and not of one or two."""
        return False

    def check(self, info: BackboneInfo, template: Template | None, method: str) -> list[str]:
        """Whether the pooling means something here; reads no weights.

        Returns:
            Warnings: what is known to be poor.

        Raises:
            UserError: what has no meaning, by key, value and fix.
        """
        return []

    def check_widths(self, info: BackboneInfo) -> None:
        """UserError where the hidden states of the layers are not of one width, for what mixes them."""
        if info.inner_width != info.width:
            raise UserError(
                f"the blocks have {info.inner_width} features and the last layer {info.width}",
                key="pooling",
                value=self.name,
                fix="pooling=mean",
            )
