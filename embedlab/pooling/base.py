"""What every pooling shares: its contract, and how to find tokens by the mask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from embedlab.config.pooling import PoolingConfig

if TYPE_CHECKING:
    from embedlab.config.backbone import BackboneInfo

Marks = Mapping[str, int]
"""Mark name to its distance from a row's last real token (0: the last); `Tokenization.marks`."""


class Pooling(nn.Module):
    """Hidden states of a batch to one vector a row.

    A subclass is a pure function of the real tokens: the same for left, right and no padding, whatever stands
    in the padding, and whoever the batch mates are. It computes in fp32 at least, also under autocast.
    """

    name: ClassVar[str]
    config_class: ClassVar[type[PoolingConfig]]
    """Its settings; they stand in the same file."""
    needs_all_layers: bool = False
    """Whether `forward` gets all N + 1 hidden states, or a tuple of the last one only."""
    dim: int
    """Width of the vectors."""

    def __init__(self, config: PoolingConfig, info: BackboneInfo) -> None:
        super().__init__()
        self.config = config
        self.dim = info.width

    def forward(self, hidden: tuple[Tensor, ...], attention_mask: Tensor, marks: Marks) -> Tensor:
        """Pool.

        Args:
            hidden: of the layers, [B, L, D] each.
            attention_mask: [B, L], 1 at real tokens; left as it is.
            marks: of the template.

        Returns:
            [B, `dim`], fp32 or wider.
        """
        raise NotImplementedError

    def position(self, attention_mask: Tensor, marks: Marks) -> Tensor | None:
        """The only token of each row that `forward` reads in the last layer, [B]; None: it reads more."""
        return None

    def take_stats(self) -> dict[str, Tensor]:
        """What the last training batch shows of the pooling, as scalars to log; empty until the next one."""
        return {}


class OneToken(Pooling):
    """The last layer at one token."""

    def position(self, attention_mask: Tensor, marks: Marks) -> Tensor:
        raise NotImplementedError

    def forward(self, hidden: tuple[Tensor, ...], attention_mask: Tensor, marks: Marks) -> Tensor:
        """As of any pooling; a last layer of one cell a row, [B, 1, D], is that of the token at `position`."""
        if hidden[-1].shape[1] == 1:
            return wide(hidden[-1][:, 0])
        return token_at(hidden[-1], self.position(attention_mask, marks))


def wide(x: Tensor) -> Tensor:
    """`x` in fp32, or as it is where that is wider."""
    return x if x.dtype == torch.float64 else x.float()


def last_index(attention_mask: Tensor) -> Tensor:
    """Position of each row's last real token, [B]; 0 where there is none."""
    positions = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    return (attention_mask.long() * positions).argmax(dim=1)


def first_index(attention_mask: Tensor) -> Tensor:
    """Position of each row's first real token, [B]; 0 where there is none."""
    return attention_mask.long().argmax(dim=1)


def mark_index(attention_mask: Tensor, marks: Marks, mark: str) -> Tensor:
    """Position of a mark in each row, [B]."""
    return (last_index(attention_mask) - marks[mark]).clamp(min=0)


def token_at(hidden: Tensor, index: Tensor) -> Tensor:
    """The vectors of `hidden` [B, L, D] at `index` [B]: [B, D], fp32 or wider."""
    at = index[:, None, None].expand(-1, 1, hidden.shape[2])
    return wide(hidden.gather(1, at).squeeze(1))


def mean_tokens(hidden: Tensor, mask: Tensor) -> Tensor:
    """Mean of `hidden` [B, L, D] over the tokens where `mask` [B, L] is 1: [B, D], fp32 or wider.

    Zero where there is none. What stands at other tokens, NaN included, has no influence.
    """
    kept = wide(hidden).masked_fill(~mask.bool()[..., None], 0.0)
    return kept.sum(dim=1) / mask.sum(dim=1, keepdim=True).clamp(min=1).to(kept.dtype)
