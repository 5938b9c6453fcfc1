"""The Triton kernels of `embedlab.kernels.lora`: products of a masked input, whose mask is drawn where it is used."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROUNDS = tl.constexpr(6)  # of Philox, as in attention (`embedlab.kernels.varlen_triton`)
_CHUNKS = 16
"""Parts of the tokens whose shares of a gradient are summed afterwards: in a fixed order, unlike atomic sums."""


@triton.jit
def _masked(x, seed, update, tokens, width, rows, first, dropout, WIDE: tl.constexpr):
    """x [rows, WIDE], 0 where update number `update` drops it; columns from `first`."""
    # A call of Philox gives the numbers of four columns, whatever the block.
    quarter: tl.constexpr = WIDE // 4
    column = first // 4 + tl.arange(0, quarter)
    counter = (update * tokens + rows[:, None]) * (width // 4) + column[None, :]
    a, b, c, d = tl.rand4x(seed, counter, _ROUNDS)
    drawn = tl.interleave(tl.interleave(a, b), tl.interleave(c, d))
    return tl.where(drawn >= dropout, x, 0.0)


@triton.jit
def _down(
    X, A, SEED, OUT, tokens, dropout, stride, width: tl.constexpr,
    RANK: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """h of one update in some rows; the first update's programs copy x beside it."""
    update = tl.program_id(1)
    seed = tl.load(SEED)
    rows, ranks = tl.program_id(0) * TALL + tl.arange(0, TALL), tl.arange(0, RANK)
    cols = tl.arange(0, WIDE)
    at = rows[:, None].to(tl.int64)
    real = rows[:, None] < tokens
    total = tl.zeros([TALL, RANK], tl.float32)
    for first in range(0, width, WIDE):
        inside = real & (first + cols[None, :] < width)
        x = tl.load(X + at * width + first + cols[None, :], mask=inside, other=0.0)
        if update == 0:
            tl.store(OUT + at * stride + first + cols[None, :], x, mask=inside)
        a = tl.load(
            A + (update * RANK + ranks[:, None]) * width + first + cols[None, :],
            mask=first + cols[None, :] < width, other=0.0,
        )  # fmt: skip
        kept = _masked(x, seed, update, tokens, width, rows, first, dropout, WIDE).to(x.dtype)
        total += tl.dot(kept, tl.trans(a), input_precision="ieee")
    total = total / (1.0 - dropout)
    place = OUT + at * stride + width + update * RANK + ranks[None, :]
    tl.store(place, total.to(OUT.dtype.element_ty), mask=real)


@triton.jit
def _of_x(
    ABOVE, A, SEED, OUT, tokens, dropout, stride, width: tl.constexpr, updates: tl.constexpr,
    RANK: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The gradient of x in a block: what comes by the frozen weights and by each update."""
    seed = tl.load(SEED)
    rows, ranks = tl.program_id(0) * TALL + tl.arange(0, TALL), tl.arange(0, RANK)
    first = tl.program_id(1) * WIDE
    cols = first + tl.arange(0, WIDE)
    at = rows[:, None].to(tl.int64)
    real = rows[:, None] < tokens
    inside = real & (cols[None, :] < width)
    total = tl.load(ABOVE + at * stride + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    for update in range(updates):
        h = tl.load(ABOVE + at * stride + width + update * RANK + ranks[None, :], mask=real, other=0.0)
        a = tl.load(
            A + (update * RANK + ranks[:, None]) * width + cols[None, :],
            mask=cols[None, :] < width,
            other=0.0,
        )
        part = tl.dot(h, a, input_precision="ieee") / (1.0 - dropout)
        total += _masked(part, seed, update, tokens, width, rows, first, dropout, WIDE)
    tl.store(OUT + at * width + cols[None, :], total.to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def _of_down(
    ABOVE, JOINED, SEED, OUT, tokens, dropout, stride, chunk, width: tl.constexpr, updates: tl.constexpr,
    RANK: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A chunk of tokens' share of the gradient of one update's A, some columns of it."""
    update, part = tl.program_id(1), tl.program_id(2)
    seed = tl.load(SEED)
    ranks = tl.arange(0, RANK)
    first = tl.program_id(0) * WIDE
    cols = first + tl.arange(0, WIDE)
    total = tl.zeros([RANK, WIDE], tl.float32)
    start = part * chunk
    end = tl.minimum(start + chunk, tokens)
    while start < end:
        rows = start + tl.arange(0, TALL)
        at = rows[:, None].to(tl.int64)
        real = rows[:, None] < tokens
        x = tl.load(JOINED + at * stride + cols[None, :], mask=real & (cols[None, :] < width), other=0.0)
        h = tl.load(ABOVE + at * stride + width + update * RANK + ranks[None, :], mask=real, other=0.0)
        kept = _masked(x, seed, update, tokens, width, rows, first, dropout, WIDE).to(x.dtype)
        total += tl.dot(tl.trans(h), kept, input_precision="ieee")
        start += TALL
    place = OUT + ((part * updates + update) * RANK + ranks[:, None]) * width + cols[None, :]
    tl.store(place, total / (1.0 - dropout), mask=cols[None, :] < width)


def launch_down(x: Tensor, down: Tensor, seed: Tensor, joined: Tensor, dropout: float) -> None:
    """Fill `joined` [T, D + n R] with x and h; arguments as those of `lora_linear`."""
    tokens, width = x.shape
    updates, rank, _ = down.shape
    tall = 64
    _down[(triton.cdiv(tokens, tall), updates)](
        x.contiguous(), down.contiguous(), seed, joined, tokens, dropout, joined.stride(0), width,
        RANK=rank, TALL=tall, WIDE=64, num_warps=4,
    )  # fmt: skip


def launch_backward(
    above: Tensor, joined: Tensor, down: Tensor, seed: Tensor, dropout: float
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of `down` from `above` [T, D + n R], those of x by the frozen weights and of h."""
    updates, rank, width = down.shape
    tokens = len(above)
    of_x, tall, wide = above.new_empty(tokens, width), 64, 64
    across = triton.cdiv(width, wide)
    _of_x[(triton.cdiv(tokens, tall), across)](
        above, down.contiguous(), seed, of_x, tokens, dropout, above.stride(0), width, updates,
        RANK=rank, TALL=tall, WIDE=wide, num_warps=4,
    )  # fmt: skip
    shares = above.new_empty(_CHUNKS, updates, rank, width, dtype=torch.float32)
    chunk = triton.cdiv(triton.cdiv(tokens, _CHUNKS), tall) * tall
    _of_down[(across, updates, _CHUNKS)](
        above, joined, seed, shares, tokens, dropout, above.stride(0), chunk, width, updates,
        RANK=rank, TALL=tall, WIDE=wide, num_warps=4,
    )  # fmt: skip
    return of_x, shares.sum(0).to(down.dtype)
