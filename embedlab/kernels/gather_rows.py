"""`embedlab.data.resident`'s gathering of ragged rows as one Triton kernel: twenty small ones are 2 % of a step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


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
    place = program.to(tl.int64) * length + cols
    tl.store(OUT + place, tl.where(real, ids, pad), mask=cols < length)
    tl.store(MASK + place, real.to(tl.int64), mask=cols < length)


def gather_ragged(
    ids: Tensor, offsets: Tensor, hashes: Tensor, rows: Tensor, length: int, bits: int, pad: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Ids and mask [B, L] and hashes [B] of the rows; arguments as the fields of `resident._Ragged`."""
    out, mask = (torch.empty(len(rows), length, dtype=torch.int64, device=rows.device) for _ in range(2))
    hash_ = torch.empty(len(rows), dtype=hashes.dtype, device=rows.device)
    if len(rows) and length:
        _gather[(len(rows),)](
            ids, offsets, hashes, rows, out, mask, hash_, length, bits, pad,
            BLOCK=triton.next_power_of_2(length), num_warps=1 if length <= 64 else 4,
        )  # fmt: skip
    return out, mask, hash_
