"""Triton kernels that bring tokens together: those of `embedlab.kernels.packing`, and rows of resident data."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TAIL = 256


@triton.jit
def _place(
    MASK, ENDS, CELL, ORDER, PLACE, BOUNDS, rows, length, capacity, BLOCK: tl.constexpr, TAIL: tl.constexpr
):
    """One row's tokens; the programs after the rows' fill the slots that no token needs."""
    program = tl.program_id(0)
    if program < rows:
        cols = tl.arange(0, BLOCK)
        start = tl.load(ENDS + program - 1, mask=program > 0, other=0)
        at = program.to(tl.int64) * length + cols
        real = tl.load(MASK + at, mask=cols < length, other=0) != 0
        within = tl.cumsum(real.to(tl.int64), 0)
        tl.store(ORDER + at, start + within, mask=cols < length)
        slot = start + within - 1
        here = real & (slot < capacity)
        tl.store(CELL + slot, at, mask=here)
        tl.store(PLACE + slot, within - 1, mask=here)
        tl.store(BOUNDS + program, tl.minimum(start, capacity).to(tl.int32))
    else:
        total = tl.load(ENDS + rows - 1)
        if program == rows:
            tl.store(BOUNDS + rows, tl.minimum(total, capacity).to(tl.int32))
        free = total + (program - rows) * TAIL + tl.arange(0, TAIL)
        tl.store(CELL + free, tl.zeros([TAIL], tl.int64) + rows * length, mask=free < capacity)
        tl.store(PLACE + free, tl.zeros([TAIL], tl.int64), mask=free < capacity)


@triton.jit
def _pack(X, CELL, OUT, cells, capacity, value, BLOCK: tl.constexpr):
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cell = tl.load(CELL + slot, mask=slot < capacity, other=0)
    x = tl.load(X + cell, mask=(slot < capacity) & (cell < cells), other=value)
    tl.store(OUT + slot, x, mask=slot < capacity)


def launch_place(
    mask: Tensor, ends: Tensor, cell: Tensor, order: Tensor, index: Tensor, bounds: Tensor
) -> None:
    """Fill `cell` and `index` [C], `order` [B, L] and `bounds` [B + 1] from `mask` [B, L] and the rows' `ends` [B]."""
    rows, length = mask.shape
    capacity = len(cell)
    # All slots may be free.
    tail = max(1, -(-capacity // _TAIL))
    _place[(rows + tail,)](
        mask, ends, cell, order, index, bounds, rows, length, capacity,
        BLOCK=triton.next_power_of_2(length), TAIL=_TAIL, num_warps=1,
    )  # fmt: skip


def launch_pack(x: Tensor, cell: Tensor, out: Tensor, value: int) -> None:
    """Fill `out` [C] with the values of `x` in the cells of the slots, and `value` elsewhere."""
    _pack[(-(-len(cell) // 1024),)](x, cell, out, x.numel(), len(cell), value, BLOCK=1024, num_warps=4)


@triton.jit
def _gather(
    IDS, OFFSETS, HASHES, ROWS, OUT, MASK, HASH, length, bits, pad, BLOCK: tl.constexpr
):  # fmt: skip
    program = tl.program_id(0)
    row = tl.load(ROWS + program)
    start, end = tl.load(OFFSETS + row), tl.load(OFFSETS + row + 1)
    tl.store(HASH + program, tl.load(HASHES + row))
    cols = tl.arange(0, BLOCK)
    real = (start + cols < end) & (cols < length)
    ids = tl.load(IDS + start + cols, mask=real, other=0).to(tl.int64) & bits
    at = program.to(tl.int64) * length + cols
    tl.store(OUT + at, tl.where(real, ids, pad), mask=cols < length)
    tl.store(MASK + at, real.to(tl.int64), mask=cols < length)


def gather_ragged(
    ids: Tensor, offsets: Tensor, hashes: Tensor, rows: Tensor, length: int, bits: int, pad: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Ids and mask [B, L] and hashes [B] of ragged rows; arguments as the fields of `resident._Ragged`.

    One launch: twenty small ones are 2 % of a step.
    """
    out, mask = (torch.empty(len(rows), length, dtype=torch.int64, device=rows.device) for _ in range(2))
    hash_ = torch.empty(len(rows), dtype=hashes.dtype, device=rows.device)
    if len(rows) and length:
        _gather[(len(rows),)](
            ids, offsets, hashes, rows, out, mask, hash_, length, bits, pad,
            BLOCK=triton.next_power_of_2(length), num_warps=1 if length <= 64 else 4,
        )  # fmt: skip
    return out, mask, hash_
