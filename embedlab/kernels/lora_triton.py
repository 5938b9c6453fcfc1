"""The Triton kernels of `embedlab.kernels.lora`: products of a masked input, whose mask is drawn once and kept in bits.

Masks are int32 [n, T, ceil(D / 32)], of each update: bit i of word j is 1 where column 32 j + i of a token is kept.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROUNDS = tl.constexpr(6)  # of Philox, as in attention (`embedlab.kernels.varlen_triton`)
_PROGRAMS = 64
"""At most, for the same columns of all updates' gradients. What each sums of its tokens is summed afterwards: in a
fixed order, unlike atomic sums."""


@triton.jit
def _digit(kept, random, ONE: tl.constexpr):
    return kept & random if ONE else kept | random


@triton.jit
def _drawn(seed, number, DROPPED: tl.constexpr):
    """Words of a mask by their `number`; a bit is 0 with a probability of DROPPED / 2^16."""
    # Of a bit that is 1 with probability q and a random one, "and" has q / 2 and "or" (1 + q) / 2: one instruction a
    # binary digit for 32 values, where to compare numbers takes two or three for each.
    kept = tl.full(number.shape, -1, tl.int32)
    for i in tl.static_range(4):
        a, b, c, d = tl.philox(seed, number, 0, i, 0, _ROUNDS)
        kept = _digit(kept, a.to(tl.int32, bitcast=True), DROPPED >> (4 * i) & 1)
        kept = _digit(kept, b.to(tl.int32, bitcast=True), DROPPED >> (4 * i + 1) & 1)
        kept = _digit(kept, c.to(tl.int32, bitcast=True), DROPPED >> (4 * i + 2) & 1)
        kept = _digit(kept, d.to(tl.int32, bitcast=True), DROPPED >> (4 * i + 3) & 1)
    return kept


@triton.jit
def draw_masks(
    BITS, SEED, update, top, tokens, width: tl.constexpr, DROPPED: tl.constexpr, TALL: tl.constexpr
):
    """The masks of one update for TALL tokens from `top` on."""
    seed = tl.load(SEED)
    words: tl.constexpr = (width + 31) // 32
    # Apart from the products: Triton would draw again in each layout that those need.
    for first in range(0, TALL * words, 128):
        at = top * words + first + tl.arange(0, 128)
        number = update * tokens * words + at
        inside = at < tl.minimum(top + TALL, tokens) * words
        tl.store(BITS + number, _drawn(seed, number, DROPPED), mask=inside)


@triton.jit
def masked(x, BITS, update, tokens, width: tl.constexpr, rows, first):
    """x [R, C], columns from `first` on, 0 where update number `update` drops it."""
    words: tl.constexpr = (width + 31) // 32
    word = first // 32 + tl.arange(0, x.shape[1] // 32)[None, :]
    at = (update * tokens + rows[:, None]) * words + word
    bits = tl.load(BITS + at, mask=(rows[:, None] < tokens) & (word < words), other=0)
    # By bytes first: a thread has eight columns side by side, and their bits then stand in known places.
    each = bits[:, :, None] >> (8 * tl.arange(0, 4))[None, None, :]
    each = each[:, :, :, None] & (1 << tl.arange(0, 8))[None, None, None, :]
    return tl.where(tl.reshape(each, x.shape) != 0, x, 0.0)


@triton.jit
def _down(
    X, A, SEED, OUT, BITS, tokens, stride, width: tl.constexpr, DROPPED: tl.constexpr,
    RANK: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The mask and h of one update in some rows; the first update's programs copy x beside h."""
    update, top = tl.program_id(1), tl.program_id(0) * TALL
    draw_masks(BITS, SEED, update, top, tokens, width, DROPPED, TALL)
    tl.debug_barrier()  # other threads read what one has stored
    rows, ranks = top + tl.arange(0, TALL), tl.arange(0, RANK)
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
        kept = masked(x, BITS, update, tokens, width, rows, first)
        total += tl.dot(kept, tl.trans(a), input_precision="ieee")
    place = OUT + at * stride + width + update * RANK + ranks[None, :]
    tl.store(place, (total * (65536 / (65536 - DROPPED))).to(OUT.dtype.element_ty), mask=real)


@triton.jit
def _of_x(
    ABOVE, A, BITS, OUT, tokens, stride, width: tl.constexpr, updates: tl.constexpr, DROPPED: tl.constexpr,
    RANK: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The gradient of x in a block: what comes by the frozen weights and by each update."""
    rows, ranks = tl.program_id(0) * TALL + tl.arange(0, TALL), tl.arange(0, RANK)
    first = tl.program_id(1) * WIDE
    cols = first + tl.arange(0, WIDE)
    at = rows[:, None].to(tl.int64)
    real = rows[:, None] < tokens
    inside = real & (cols[None, :] < width)
    total = tl.zeros([TALL, WIDE], tl.float32)
    for update in tl.static_range(updates):
        h = tl.load(ABOVE + at * stride + width + update * RANK + ranks[None, :], mask=real, other=0.0)
        a = tl.load(
            A + (update * RANK + ranks[:, None]) * width + cols[None, :],
            mask=cols[None, :] < width,
            other=0.0,
        )
        part = tl.dot(h, a, input_precision="ieee")
        total += masked(part, BITS, update, tokens, width, rows, first) if DROPPED > 0 else part
    frozen = tl.load(ABOVE + at * stride + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    total = frozen + total * (65536 / (65536 - DROPPED))
    tl.store(OUT + at * width + cols[None, :], total.to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def _of_down(
    ABOVE, JOINED, BITS, OUT, tokens, stride, width: tl.constexpr, updates: tl.constexpr, DROPPED: tl.constexpr,
    RANK: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """What TURNS times TALL tokens add to the gradient of one update's A, some columns of it."""
    update, part = tl.program_id(1), tl.program_id(2)
    ranks = tl.arange(0, RANK)
    first = tl.program_id(0) * WIDE
    cols = first + tl.arange(0, WIDE)
    total = tl.zeros([RANK, WIDE], tl.float32)
    for turn in range(TURNS):
        rows = (part * TURNS + turn) * TALL + tl.arange(0, TALL)
        at = rows[:, None].to(tl.int64)
        real = rows[:, None] < tokens
        x = tl.load(JOINED + at * stride + cols[None, :], mask=real & (cols[None, :] < width), other=0.0)
        h = tl.load(ABOVE + at * stride + width + update * RANK + ranks[None, :], mask=real, other=0.0)
        kept = masked(x, BITS, update, tokens, width, rows, first)
        total += tl.dot(tl.trans(h), kept, input_precision="ieee")
    place = OUT + ((part * updates + update) * RANK + ranks[:, None]) * width + cols[None, :]
    tl.store(place, total * (65536 / (65536 - DROPPED)), mask=cols[None, :] < width)


def launch_down(x: Tensor, down: Tensor, seed: Tensor, joined: Tensor, bits: Tensor, dropped: int) -> None:
    """Fill `joined` [T, D + n R] with x and h, and `bits`; arguments as those of `lora_linear`."""
    tokens, width = x.shape
    updates, rank, _ = down.shape
    tall = 32
    _down[(triton.cdiv(tokens, tall), updates)](
        x.contiguous(), down.contiguous(), seed, joined, bits, tokens, joined.stride(0), width, dropped,
        RANK=rank, TALL=tall, WIDE=64, num_warps=4, num_stages=4,
    )  # fmt: skip


def launch_of_x(above: Tensor, bits: Tensor, down: Tensor, dropped: int) -> Tensor:
    """Gradient of x from `above` [T, D + n R], those of x by the frozen weights and of h."""
    updates, rank, width = down.shape
    tokens = len(above)
    tall = wide = _block(above)
    of_x, across = above.new_empty(tokens, width), triton.cdiv(width, wide)
    _of_x[(triton.cdiv(tokens, tall), across)](
        above, down.contiguous(), bits, of_x, tokens, above.stride(0), width, updates, dropped,
        RANK=rank, TALL=tall, WIDE=wide, num_warps=4,
    )  # fmt: skip
    return of_x


def _block(x: Tensor) -> int:
    """Rows and columns of it that a program has: products of fp32 need more registers."""
    return 64 if x.element_size() == 2 else 32


def launch_backward(
    above: Tensor, joined: Tensor, bits: Tensor, down: Tensor, dropped: int
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of `down` from `above` [T, D + n R], those of x by the frozen weights and of h."""
    updates, rank, width = down.shape
    tokens = len(above)
    of_x = launch_of_x(above, bits, down, dropped)
    tall = wide = _block(above)
    across = triton.cdiv(width, wide)
    turns = triton.next_power_of_2(
        triton.cdiv(tokens * updates, _PROGRAMS * tall)
    )  # few, since each is compiled
    parts = triton.cdiv(tokens, turns * tall)
    shares = above.new_empty(parts, updates, rank, width, dtype=torch.float32)
    _of_down[(across, updates, parts)](
        above, joined, bits, shares, tokens, above.stride(0), width, updates, dropped,
        RANK=rank, TALL=tall, WIDE=wide, TURNS=turns, num_warps=4,
    )  # fmt: skip
    return of_x, shares.sum(0).to(down.dtype)
