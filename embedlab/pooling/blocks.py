"""Poolings over the last n blocks: which blocks, which tokens, and how a vector is read from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from embedlab.backbones.architecture import check_layer_states
from embedlab.config.backbone import BackboneInfo
from embedlab.config.build import within
from embedlab.config.pooling import PoolingConfig
from embedlab.config.template import Template
from embedlab.errors import UserError
from embedlab.objectives.precision import to_fp32
from embedlab.pooling.base import Marks, Pooling, Token, check_token, mean_tokens, token_index


@dataclass(frozen=True)
class BlocksConfig(PoolingConfig):
    """What the poolings over several blocks share."""

    name: str
    n: int = within(3, least=1)
    """Blocks that are mixed, the last ones."""
    block_offset: int = within(0, least=0)
    """Blocks left out at the end: 1 mixes H^(L-n) to H^(L-1), with the embedding layer as H^(0)."""
    pool: Literal["mean"] | Token = "mean"
    """The ``mean`` over tokens, or the token ``cls``, ``mask`` (of a template) or ``last``."""
    lr_mult: float = within(1.0, above=0)
    """Of the learning rate, for the pooling's own weights."""

    @property
    def averages_tokens(self) -> bool:
        return self.pool == "mean"

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
        check_token(self.pool, info, template, "pooling.pool", self.pool)
        return []


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
        blocks = [to_fp32(h) for h in hidden[end - self.config.n : end]]
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
            return mean_tokens(u, mask)
        index = token_index(mask, marks, self.config.pool)[:, None, None]
        return u.gather(-2, index.expand(*u.shape[:-2], 1, u.shape[-1])).squeeze(-2)


def inner_tokens(mask: Tensor, before: int, after: int) -> Tensor:
    """``mask`` [B, L] without each row's first ``before`` and last ``after`` real tokens."""
    counted = mask.long()
    position = counted.cumsum(1)
    inside = (position > before) & (position <= counted.sum(1, keepdim=True) - after)
    return counted * inside
