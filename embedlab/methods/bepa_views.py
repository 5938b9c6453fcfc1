"""Translation pairs as the encoder sees them in BEPA: packed, and packed with one side masked or out of sight."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FIRST, SECOND, PADDING = 0, 1, 2


class Packed(NamedTuple):
    """``[CLS] x [SEP] [CLS] y [SEP]`` in one row: BEPA's form, in which each sentence keeps its own special tokens."""

    input_ids: Tensor
    """``[B, L1 + L2]``, padded on the right."""
    side: Tensor
    """``[B, L1 + L2]``: `FIRST`, `SECOND` or `PADDING`."""

    @property
    def attention_mask(self) -> Tensor:
        return (self.side != PADDING).long()


def pack(first: dict[str, Tensor], second: dict[str, Tensor], pad_id: int) -> Packed:
    """Both sides in one row, the second right after the first, by operations of fixed shape."""
    ids = torch.cat([first["input_ids"], second["input_ids"]], 1)
    n = first["attention_mask"].sum(1, keepdim=True)
    end = n + second["attention_mask"].sum(1, keepdim=True)
    position = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    source = torch.where(
        position < n, position, (position - n + first["input_ids"].shape[1]).clamp(max=ids.shape[1] - 1)
    )
    side = (position >= n).long() + (position >= end).long()
    return Packed(torch.where(side == PADDING, pad_id, ids.gather(1, source)), side)


def mask_side(packed: Packed, side: int, mask_id: int) -> Tensor:
    """Ids with every token of a side masked, so that only its length is left to see.

    As the authors had it: the second side goes with its [CLS], of the first side the [CLS] stays.
    """
    masked = packed.side == side
    if side == FIRST:
        masked[:, 0] = False
    return torch.where(masked, mask_id, packed.input_ids)


def block_diagonal_mask(packed: Packed, position_offset: int) -> tuple[Tensor, Tensor]:
    """Mask and positions under which each side of a packed row is encoded as if it stood alone.

    Returns:
        Bool ``[B, 1, L, L]``, True where a token may look (padding sees padding, so that no row is without), and
        position ids ``[B, L]``, which start again with the second side.
    """
    side = packed.side
    allowed = (side[:, :, None] == side[:, None, :]).unsqueeze(1)
    position = torch.arange(side.shape[1], device=side.device).expand_as(side)
    n = (side == FIRST).sum(1, keepdim=True)
    position = torch.where(side == SECOND, position - n, position).masked_fill(side == PADDING, 0)
    return allowed, position + position_offset
