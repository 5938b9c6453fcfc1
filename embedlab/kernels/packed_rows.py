"""Rows of a batch one after another, without padding, brought from the host to a device in one copy."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embedlab.kernels.packing import token_capacity

_ROWS = 16
"""Rows are filled up to a multiple of it by empty ones: Triton compiles a kernel anew for a number that is none."""


class PackedRows(NamedTuple):
    """Rows [R] in slots [C].

    Attributes:
        ids, positions: int32 [C]; slots of no row have padding at the first position.
        bounds: int32 [R + 1]: row i has the slots from ``bounds[i]`` to ``bounds[i + 1]``.
        offset: position of a row's first token.
        rows: those of the batch; R - `rows` empty ones follow.
        tokens: slots that belong to a row; they are the first.
        longest: tokens of the longest row.
        skip: tokens at the start of each row that no pooling reads.
    """

    ids: Tensor
    positions: Tensor
    bounds: Tensor
    offset: int
    rows: int
    tokens: int
    longest: int
    skip: int = 0

    @property
    def within(self) -> Tensor:
        """int32 [`tokens`]: the number of each token in its row, from 0."""
        return self.positions[: self.tokens] - self.offset

    def mask(self) -> Tensor:
        """``[R, longest]``: 1 at the tokens that are read, as the mask of padded rows."""
        number = torch.arange(self.longest, device=self.bounds.device)
        return ((number < self.bounds.diff()[:, None]) & (number >= self.skip)).long()

    def padded(self, states: Tensor) -> Tensor:
        """States ``[C, D]`` in padded form, ``[R, longest, D]``, 0 at padding."""
        number = torch.arange(self.tokens, dtype=torch.int32, device=states.device)
        row = torch.searchsorted(self.bounds[1:], number, right=True)
        cells = states.new_zeros((len(self.bounds) - 1) * self.longest, states.shape[1])
        cells.index_copy_(0, row * self.longest + self.within, states[: self.tokens])
        return cells.view(-1, self.longest, states.shape[1])


def pack(
    ids: NDArray[np.int32],
    bounds: NDArray[np.int64],
    chosen: NDArray[Any],
    device: torch.device,
    pad: int = 0,
    offset: int = 0,
    skip: int = 0,
) -> PackedRows:
    """The `chosen` ones of the rows that lie in `ids`, row i from ``bounds[i]`` to ``bounds[i + 1]``.

    Args:
        ids, bounds: on the host.
        chosen: numbers of rows.
        device: of the result; the host does not wait for the copy.
        pad: id in slots of no row.
        offset: position of a row's first token.
        skip: tokens at the start of each row that no pooling reads.
    """
    lengths = np.diff(bounds)[chosen]
    ends = lengths.cumsum()
    tokens = int(lengths.sum())
    slots, rows = token_capacity(max(1, tokens)), max(1, -(-len(chosen) // _ROWS)) * _ROWS
    # One piece, whose parts begin at multiples of 16 bytes: one copy, and kernels take addresses to be aligned.
    whole = torch.empty(2 * slots + rows + 1, dtype=torch.int32, pin_memory=device.type == "cuda")
    into_ids, places, into_bounds = np.split(whole.numpy(), (slots, 2 * slots))
    within = np.arange(tokens) - np.repeat(ends - lengths, lengths)
    into_ids[:tokens] = ids[np.repeat(bounds[:-1][chosen], lengths) + within]
    into_ids[tokens:] = pad
    places[:tokens] = within + offset
    places[tokens:] = offset
    into_bounds[0] = 0
    into_bounds[1 : len(ends) + 1] = ends
    into_bounds[len(ends) + 1 :] = tokens
    there = whole.to(device, non_blocking=True).split((slots, slots, rows + 1))
    longest = int(lengths.max(initial=1))
    return PackedRows(there[0], there[1], there[2], offset, len(chosen), tokens, longest, skip)
