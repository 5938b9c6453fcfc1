"""Attention of `embedlab.kernels.varlen_triton` for `fused_decoder`: causal, without dropout.

Query, key and value are columns of one tensor, as their product left them. Rotary positions are put in on the chip, a
row's first token having position 0, and the gradient of what the output layer's update reads is added there.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from embedlab.kernels.lora_triton import masked
from embedlab.kernels.varlen_triton import _allowed, _block, _clear, _tile, _warps


@triton.jit
def _turned(base, stride, rows, length, COS, SIN, HALF: tl.constexpr):
    """Both halves of a head's values [BLOCK, 2 HALF] at their positions."""
    cols = tl.arange(0, HALF)
    a = _tile(base, 0, stride, rows, cols, length, HALF).to(tl.float32)
    b = _tile(base, HALF, stride, rows, cols, length, HALF).to(tl.float32)
    at = rows[:, None] * HALF + cols[None, :]
    cos, sin = tl.load(COS + at), tl.load(SIN + at)
    kind = base.dtype.element_ty
    return (a * cos - b * sin).to(kind), (b * cos + a * sin).to(kind)


@triton.jit
def _store_unturned(base, stride, rows, real, a, b, COS, SIN, HALF: tl.constexpr):
    """The gradient of values from those (a, b) of their two halves at their positions."""
    cols = tl.arange(0, HALF)
    at = rows[:, None] * HALF + cols[None, :]
    cos, sin = tl.load(COS + at), tl.load(SIN + at)
    place = base + rows[:, None] * stride + cols[None, :]
    kind = base.dtype.element_ty
    tl.store(place, (a * cos + b * sin).to(kind), mask=real)
    tl.store(place + HALF, (b * cos - a * sin).to(kind), mask=real)


@triton.jit
def _soft_max(q1, q2, k1, k2, allowed, scale):
    """Weights in fp32; a row in which nothing is allowed is 0."""
    scores = tl.dot(q1, tl.trans(k1), input_precision="ieee")
    scores = tl.dot(q2, tl.trans(k2), acc=scores, input_precision="ieee") * scale
    scores = tl.where(allowed, scores, -1.0e30)
    grown = tl.where(allowed, tl.exp(scores - tl.max(scores, 1)[:, None]), 0.0)
    total = tl.sum(grown, 1)
    return grown / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit
def _rotary_forward(
    QKV, COS, SIN, BOUNDS, OUT, heads, batch, capacity, scale, stride, out_stride,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    b, h = program // heads, program % heads
    start = tl.load(BOUNDS + b)
    if b == batch:
        _clear(OUT, h * WIDTH, out_stride, start, capacity, BLOCK, WIDTH)
    else:
        length = tl.load(BOUNDS + b + 1) - start
        first = start.to(tl.int64)
        rows, cols = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
        own = QKV + first * stride
        key = own + (heads + h // GROUP) * WIDTH
        q1, q2 = _turned(own + h * WIDTH, stride, rows, length, COS, SIN, WIDTH // 2)
        k1, k2 = _turned(key, stride, rows, length, COS, SIN, WIDTH // 2)
        v = _tile(key, heads // GROUP * WIDTH, stride, rows, cols, length, WIDTH)
        p = _soft_max(q1, q2, k1, k2, _allowed(rows, length, True), scale)
        out = tl.dot(p.to(v.dtype), v, input_precision="ieee")
        at = OUT + first * out_stride + h * WIDTH + rows[:, None] * out_stride + cols[None, :]
        tl.store(at, out.to(OUT.dtype.element_ty), mask=rows[:, None] < length)


@triton.jit
def _rotary_backward(
    QKV, COS, SIN, BOUNDS, ABOVE, A, BITS, DQKV, batch, tokens, scale, stride, above_stride,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, DROPPED: tl.constexpr,
    RANK: tl.constexpr,
):  # fmt: skip
    """ABOVE [T, heads WIDTH + R]: gradients of the context by the frozen weights, and of the output layer's h."""
    program = tl.program_id(0)
    b, shared = program // GROUPS, program % GROUPS
    heads: tl.constexpr = GROUP * GROUPS
    start = tl.load(BOUNDS + b)
    if b == batch:
        for n in tl.static_range(GROUP):
            _clear(DQKV, (shared * GROUP + n) * WIDTH, stride, start, tokens, BLOCK, WIDTH)
        _clear(DQKV, (heads + shared) * WIDTH, stride, start, tokens, BLOCK, WIDTH)
        _clear(DQKV, (heads + GROUPS + shared) * WIDTH, stride, start, tokens, BLOCK, WIDTH)
    else:
        length = tl.load(BOUNDS + b + 1) - start
        first = start.to(tl.int64)
        rows, cols, ranks = tl.arange(0, BLOCK), tl.arange(0, WIDTH), tl.arange(0, RANK)
        half: tl.constexpr = WIDTH // 2
        real = rows[:, None] < length
        own, of_own = QKV + first * stride, DQKV + first * stride
        to_key, to_value = (heads + shared) * WIDTH, (heads + GROUPS + shared) * WIDTH
        k1, k2 = _turned(own + to_key, stride, rows, length, COS, SIN, half)
        v = _tile(own, to_value, stride, rows, cols, length, WIDTH)
        allowed = _allowed(rows, length, True)
        above = ABOVE + first * above_stride + rows[:, None] * above_stride
        dh = tl.load(above + heads * WIDTH + ranks[None, :], mask=real, other=0.0)
        dk1, dk2 = tl.zeros([BLOCK, half], tl.float32), tl.zeros([BLOCK, half], tl.float32)
        dv = tl.zeros([BLOCK, WIDTH], tl.float32)
        for n in range(GROUP):
            to_query = (shared * GROUP + n) * WIDTH
            q1, q2 = _turned(own + to_query, stride, rows, length, COS, SIN, half)
            a = tl.load(A + ranks[:, None] * (heads * WIDTH) + to_query + cols[None, :])
            by_update = tl.dot(dh, a, input_precision="ieee")
            if DROPPED > 0:
                by_update = masked(by_update, BITS, 0, tokens, heads * WIDTH, start + rows, to_query)
            frozen = tl.load(above + to_query + cols[None, :], mask=real, other=0.0).to(tl.float32)
            do = (frozen + by_update * (65536 / (65536 - DROPPED))).to(v.dtype)
            p = _soft_max(q1, q2, k1, k2, allowed, scale)
            dp = tl.dot(do, tl.trans(v), input_precision="ieee")
            dv += tl.dot(tl.trans(p.to(v.dtype)), do, input_precision="ieee")
            ds = (p * (dp - tl.sum(p * dp, 1)[:, None]) * scale).to(v.dtype)
            dq1 = tl.dot(ds, k1, input_precision="ieee")
            dq2 = tl.dot(ds, k2, input_precision="ieee")
            _store_unturned(of_own + to_query, stride, rows, real, dq1, dq2, COS, SIN, half)
            dk1 += tl.dot(tl.trans(ds), q1, input_precision="ieee")
            dk2 += tl.dot(tl.trans(ds), q2, input_precision="ieee")
        _store_unturned(of_own + to_key, stride, rows, real, dk1, dk2, COS, SIN, half)
        at = of_own + to_value + rows[:, None] * stride + cols[None, :]
        tl.store(at, dv.to(DQKV.dtype.element_ty), mask=real)


def launch_forward(
    qkv: Tensor, cos: Tensor, sin: Tensor, bounds: Tensor, out: Tensor, longest: int, scale: float, heads: int,
    shared: int,
) -> None:  # fmt: skip
    """Fill the first columns of `out` with the context.

    Args:
        qkv: ``[T, (heads + 2 shared) D]``.
        cos, sin: fp32 ``[longest, D / 2]``.
        bounds: int32 ``[B + 1]``: row i has the tokens from ``bounds[i]`` to ``bounds[i + 1]``.
        out: ``[T, at least heads D]``; 0 in tokens of no row.
        longest: at least the tokens of every row, a power of two from 16.
        scale: of the scores.
        heads, shared: of queries, and of keys and values.
    """
    tokens, width = len(qkv), qkv.shape[1] // (heads + 2 * shared)
    batch, block = len(bounds) - 1, _block(longest)
    _rotary_forward[((batch + 1) * heads,)](
        qkv, cos, sin, bounds, out, heads, batch, tokens, scale, qkv.stride(0), out.stride(0),
        BLOCK=block, WIDTH=width, GROUP=heads // shared, num_warps=_warps(block),
    )  # fmt: skip


def launch_backward(
    qkv: Tensor, cos: Tensor, sin: Tensor, bounds: Tensor, above: Tensor, down: Tensor, bits: Tensor, out: Tensor,
    longest: int, scale: float, heads: int, shared: int, dropped: int,
) -> None:  # fmt: skip
    """Fill `out`, the gradient of `qkv`.

    Args:
        above: ``[T, heads D + R]``: gradients of the context by the frozen weights, and of the output layer's h.
        down, bits: A ``[1, R, heads D]`` and mask of the output layer's update.
        out: as `qkv`, contiguous as that is.
        dropped: in 2^-16, of that update's input; 0: `bits` is not read.
    """
    tokens, width = len(qkv), qkv.shape[1] // (heads + 2 * shared)
    batch, block = len(bounds) - 1, _block(longest)
    _rotary_backward[((batch + 1) * shared,)](
        qkv, cos, sin, bounds, above, down, bits, out, batch, tokens, scale, qkv.stride(0), above.stride(0),
        BLOCK=block, WIDTH=width, GROUP=heads // shared, GROUPS=shared, DROPPED=dropped, RANK=down.shape[1],
        num_warps=4 if block * width <= 64 * 64 else 8, num_stages=2,
    )  # fmt: skip
