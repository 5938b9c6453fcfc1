"""Rows without their padding: the true tokens of a batch one after another, in a number of slots that is fixed.

All shapes come from arguments, so that packing can be captured in a CUDA graph: slots that no token needs hold
padding, and nothing reads what the model makes of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from embedlab.kernels.available import has_triton

MODEL_TYPES = frozenset(("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "modernbert"))
"""Encoders whose tokens meet in attention alone, reached through transformers' interface, and whose positions are
told by ids."""
DECODER_TYPES = frozenset(
    (
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "gemma",
        "gemma3_text",
        "opt",
        "gpt_neox",
        "smollm3",
        "olmo2",
        "granite",
    )
)
"""Decoders of which the same is true."""


def packable(model_type: str, kind: str) -> bool:
    """Whether a model (``kind``: encoder or decoder, `BackboneInfo`) can compute rows without their padding."""
    return model_type in (DECODER_TYPES if kind == "decoder" else MODEL_TYPES)


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
        cell: int64 [C], the cell of each slot; B L where it has none.
        index: int64 [C], the number of each slot's token among those of its row, from 0; 0 where there is none.
    """

    def __init__(self, mask: Tensor, capacity: int) -> None:
        self.shape = mask.shape
        self._kernels = mask.is_cuda and has_triton()
        if self._kernels:
            self._place_by_kernel(mask, capacity)
        else:
            self._place_by_lines(mask, capacity)

    @property
    def used(self) -> Tensor:
        """bool ``[1, C]``, True where a slot holds a token."""
        return (self.cell < self.shape.numel())[None]

    def _place_by_lines(self, mask: Tensor, capacity: int) -> None:
        real = mask.reshape(-1) != 0
        cells = real.numel()
        order = real.cumsum(0)
        self._real, self._order = real.view(self.shape), order.view(self.shape)
        # What has no slot goes to one more, which is cut off: its value does not matter.
        slot = torch.where(real, order - 1, capacity).clamp(max=capacity)
        number = torch.arange(cells, device=mask.device)
        self.cell = torch.full((capacity + 1,), cells, device=mask.device).scatter(0, slot, number)[:-1]
        ends = self._order[:, -1]
        within = (self._order - torch.nn.functional.pad(ends[:-1], (1, 0))[:, None] - 1).clamp(min=0)
        self.index = self.pack(within, 0)[0]
        self.bounds = torch.nn.functional.pad(ends.clamp(max=capacity), (1, 0)).int()

    def _place_by_kernel(self, mask: Tensor, capacity: int) -> None:
        from embedlab.kernels.packing_triton import launch_place

        mask = mask.contiguous()
        self._real = mask != 0
        ends = mask.count_nonzero(1).cumsum(0)
        self._order = torch.empty_like(mask, dtype=torch.int64)
        self.cell = torch.empty(capacity, dtype=torch.int64, device=mask.device)
        self.index = torch.empty_like(self.cell)
        self.bounds = torch.empty(len(mask) + 1, dtype=torch.int32, device=mask.device)
        launch_place(mask, ends, self.cell, self._order, self.index, self.bounds)

    def of(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """The slot of the cell at ``position`` [B] or [B, k] of each row, and whether there is a token in it: alike."""
        at = position.view(len(position), -1)
        slot = (self._order.gather(1, at) - 1).clamp(min=0, max=len(self.cell) - 1)
        return slot.view_as(position), self._real.gather(1, at).view_as(position)

    def of_cells(self, cells: Tensor) -> Tensor:
        """The slots of cells [P] of the flattened batch; of one without a token any slot."""
        return (self._order.flatten().index_select(0, cells) - 1).clamp(min=0, max=len(self.cell) - 1)

    def pack(self, x: Tensor, value: int) -> Tensor:
        """``[B, L]`` to ``[1, C]``; `value` in unused slots."""
        if self._kernels and x.is_contiguous():
            from embedlab.kernels.packing_triton import launch_pack

            out = x.new_empty(1, len(self.cell))
            launch_pack(x, self.cell, out, value)
            return out
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


class FullRows:
    """`Slots` of a batch whose cells all hold tokens: nothing is moved.

    Args:
        like: any tensor ``[B, L]`` of the batch.
    """

    def __init__(self, like: Tensor) -> None:
        rows, length = self.shape = like.shape
        number = torch.arange(rows * length, device=like.device)
        self.cell, self.index = number, number % length
        self.bounds = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=like.device)

    def of(self, position: Tensor) -> tuple[Tensor, Tensor]:
        slot = self.bounds[:-1, None] + position.view(len(position), -1)
        return slot.view_as(position), torch.ones_like(position, dtype=torch.bool)

    def of_cells(self, cells: Tensor) -> Tensor:
        return cells

    def pack(self, x: Tensor, value: int) -> Tensor:
        return x.reshape(1, -1)

    def unpack(self, x: Tensor) -> Tensor:
        return x.view(*self.shape, -1)

    def unpack_all(self, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(self.unpack(x) for x in states)
