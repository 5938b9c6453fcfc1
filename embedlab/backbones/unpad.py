"""Rows without their padding: the true tokens of a batch one after another, in a number of slots that is fixed.

All shapes come from arguments, so that packing can be captured in a CUDA graph: slots that no token needs hold
padding, and nothing reads what the model makes of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MODEL_TYPES = frozenset(("bert", "roberta", "xlm-roberta", "camembert", "distilbert"))
"""Encoders whose tokens meet in attention alone, reached through transformers' interface, and whose positions are
told by ids."""


def token_capacity(tokens: int) -> int:
    """Slots for this many tokens: rounded up to few distinct numbers, by 1/32 to 1/64 (at least by 64)."""
    unit = max(64, 1 << max(0, tokens.bit_length() - 6))
    return -(-tokens // unit) * unit


def row_capacity(longest: int) -> int:
    """Cells of a row that goes back to padded form: a power of two, as few distinct ones as there are kernels."""
    return max(8, 1 << (longest - 1).bit_length())


class Slots:
    """Where each true token of a padded batch is among the slots, and back.

    Args:
        mask: ``[B, L]``, 1 at the true tokens, wherever they are in a row.
        capacity: slots C; at least the true tokens of the batch.

    Attributes:
        bounds: int32 ``[B + 1]``: row i has the slots from ``bounds[i]`` to ``bounds[i + 1]``.
        used: bool ``[1, C]``, True where a slot holds a token.
    """

    def __init__(self, mask: Tensor, capacity: int) -> None:
        self.shape = mask.shape
        real = mask.reshape(-1) != 0
        cells = real.numel()
        order = real.cumsum(0)
        self._real, self._order = real.view(self.shape), order.view(self.shape)
        # What has no place goes to one more slot, which is cut off: its value does not matter.
        slot = torch.where(real, order - 1, capacity).clamp(max=capacity)
        number = torch.arange(cells, device=mask.device)
        self.cell = torch.full((capacity + 1,), cells, device=mask.device).scatter(0, slot, number)[:-1]
        """int64 [C]: the cell of each slot; `cells` where it has none."""
        self.used = (self.cell < cells)[None]
        ends = order.view(self.shape)[:, -1].clamp(max=capacity)
        self.bounds = torch.nn.functional.pad(ends, (1, 0)).int()

    def of(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """The slot of the cell at ``position`` [B] of each row, and whether there is a token in it: ``[B]`` each."""
        at = position[:, None]
        slot = (self._order.gather(1, at) - 1).clamp(min=0, max=len(self.cell) - 1)
        return slot[:, 0], self._real.gather(1, at)[:, 0]

    def pack(self, x: Tensor, value: int) -> Tensor:
        """``[B, L]`` to ``[1, C]``; `value` in unused slots."""
        taken = x.reshape(-1)[self.cell.clamp(max=x.numel() - 1)]
        return torch.where(self.used, taken[None], value)

    def unpack(self, x: Tensor) -> Tensor:
        """``[1, C, D]`` to ``[B, L, D]``, 0 at padding."""
        rows, length = self.shape
        # Unused slots meet in one cell more. (Its gradient is 0: an index_copy's is a plain selection, where that
        # of an indexing would be a sum over sorted indices.)
        cells = x.new_zeros(rows * length + 1, x.shape[-1]).index_copy(0, self.cell, x[0])
        return cells[:-1].view(rows, length, -1)

    def unpack_all(self, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(self.unpack(x) for x in states)
