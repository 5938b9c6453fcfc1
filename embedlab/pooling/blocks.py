"""Poolings over the last n blocks: which blocks, which tokens, and how a vector is read from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from embedlab.backbones.architecture import check_layer_states
from embedlab.config.pooling import PoolingConfig
from embedlab.errors import UserError
from embedlab.pooling.base import Marks, Pooling, first_index, last_index, mark_index, wide

if TYPE_CHECKING:
    from embedlab.config.backbone import BackboneInfo
    from embedlab.config.template import Template

READ_OUTS = ("mean", "cls", "mask", "last")


@dataclass(frozen=True)
class BlocksConfig(PoolingConfig):
    """What the poolings over several blocks share."""

    name: str
    n: int = 3
    """Blocks that are mixed, the last ones."""
    block_offset: int = 0
    """Blocks left out at the end: 1 mixes H^(L-n) to H^(L-1), with the embedding layer as H^(0)."""
    pool: str = "mean"
    """The ``mean`` over tokens, or the token ``cls``, ``mask`` (of a template) or ``last``."""
    lr_mult: float = 1.0
    """Of the learning rate, for the pooling's own weights."""

    def __post_init__(self) -> None:
        for key in ("n", "block_offset"):
            value, least = getattr(self, key), 1 if key == "n" else 0
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UserError(f"must be a number from {least} on", key=f"pooling.{key}", value=value)
        one_of("pool", self.pool, READ_OUTS)
        if not self.lr_mult > 0:
            raise UserError("must be positive", key="pooling.lr_mult", value=self.lr_mult)

    def check(self, info: BackboneInfo, template: Template | None, method: str) -> list[str]:
        check_layer_states(info.model_type)
        if self.n > info.layers:
            raise UserError(
                f"this backbone has {info.layers} blocks",
                key="pooling.n",
                value=self.n,
                fix=f"1 to {info.layers}",
            )
        most = info.layers + 1 - self.n
        if self.block_offset > most:
            raise UserError(
                f"{self.n} of {info.layers} blocks leave room for an offset of {most}",
                key="pooling.block_offset",
                value=self.block_offset,
                fix=f"0 to {most}",
            )
        self.check_widths(info)
        self._check_read_out(info, template)
        return []

    def _check_read_out(self, info: BackboneInfo, template: Template | None) -> None:
        if self.pool == "mask" and not info.has_mask_token:
            raise UserError(
                f"{info.model_type}'s tokenizer has no mask token to read out",
                key="pooling.pool",
                value=self.pool,
                fix="an encoder backbone, or pooling.pool=mean",
            )
        if self.pool == "mask" and (template is None or "mask" not in template.marks):
            raise UserError(
                "there is no {mask} in the template to read out",
                key="pooling.pool",
                value=self.pool,
                fix="template=promptbert_bert, or pooling.pool=mean",
            )
        if self.pool == "cls" and info.kind == "decoder":
            raise UserError(
                "the first token of a decoder has seen nothing of the sentence",
                key="pooling.pool",
                value=self.pool,
                fix="pooling.pool=mean or last",
            )


class Blocks(Pooling):
    """Takes all hidden states; finds the blocks, and reads tokens from them."""

    needs_all_layers = True
    config: BlocksConfig

    def __init__(self, config: PoolingConfig, info: BackboneInfo) -> None:
        super().__init__(config, info)
        self.lr_multiplier = self.config.lr_mult

    def blocks(self, hidden: tuple[Tensor, ...], mask: Tensor | None) -> list[Tensor]:
        """The last n blocks, oldest first, [B, L, D] in fp32 or wider; zero at padding if given a mask."""
        end = len(hidden) - self.config.block_offset
        blocks = [wide(h) for h in hidden[end - self.config.n : end]]
        if mask is None:
            return blocks
        padding = ~mask.bool()[..., None]
        return [h.masked_fill(padding, 0.0) for h in blocks]

    def read_blocks(self, hidden: tuple[Tensor, ...], mask: Tensor, marks: Marks) -> Tensor:
        """The vector of each of them, [n, B, D]."""
        return torch.stack([self.read(u, mask, marks) for u in self.blocks(hidden, mask)])

    def read(self, u: Tensor, mask: Tensor, marks: Marks) -> Tensor:
        """[..., B, L, D] to [..., B, D] by ``pool``; ``mask`` [B, L] says which tokens the mean is over."""
        if self.config.pool == "mean":
            kept = mask.to(u.dtype)
            return (u * kept[..., None]).sum(-2) / kept.sum(1, keepdim=True).clamp(min=1)
        index = self.token(mask, marks)[:, None, None].expand(*u.shape[:-2], 1, u.shape[-1])
        return u.gather(-2, index).squeeze(-2)

    def token(self, mask: Tensor, marks: Marks) -> Tensor:
        """Position of the token that is read, [B]."""
        if self.config.pool == "cls":
            return first_index(mask)
        return last_index(mask) if self.config.pool == "last" else mark_index(mask, marks, "mask")


def inner_tokens(mask: Tensor, before: int, after: int) -> Tensor:
    """``mask`` [B, L] without each row's first ``before`` and last ``after`` real tokens."""
    counted = mask.long()
    position = counted.cumsum(1)
    inside = (position > before) & (position <= counted.sum(1, keepdim=True) - after)
    return counted * inside


def one_of(key: str, value: object, known: tuple[str, ...]) -> None:
    """``UserError`` for a setting of a pooling that is none of those known."""
    if value not in known:
        raise UserError("unknown value", key=f"pooling.{key}", value=value, fix=f"one of {', '.join(known)}")
