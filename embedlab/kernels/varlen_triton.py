"""The Triton kernels of `embedlab.kernels.varlen_attention`: one program holds a whole head of a whole row.

As `embedlab.kernels.short_attention`, with rows of different lengths one after another. One more program for each
head fills the slots that belong to no row with 0.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from embedlab.kernels.short_attention import _block, _context, _gradients, _tile, _warps


@triton.jit
def _clear(OUT, head, stride, start, end, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Slots from start to end of one head become 0."""
    rows, cols = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    first = start
    while first < end:
        slots = first + rows
        at = OUT + head + slots[:, None].to(tl.int64) * stride + cols[None, :]
        tl.store(at, tl.zeros([BLOCK, WIDTH], OUT.dtype.element_ty), mask=slots[:, None] < end)
        first += BLOCK


@triton.jit
def _forward(
    Q, K, V, BOUNDS, SEED, OUT, heads, batch, capacity, scale, dropout,
    qh, ql, kh, kl, vh, vl, oh, ol,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    b, h = program // heads, (program % heads).to(tl.int64)
    start = tl.load(BOUNDS + b)
    if b == batch:
        _clear(OUT, h * oh, ol, start, capacity, BLOCK, WIDTH)
    else:
        length = tl.load(BOUNDS + b + 1) - start
        first = start.to(tl.int64)
        rows, cols = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
        q = _tile(Q, h * qh + first * ql, ql, rows, cols, length, WIDTH)
        k = _tile(K, h * kh + first * kl, kl, rows, cols, length, WIDTH)
        v = _tile(V, h * vh + first * vl, vl, rows, cols, length, WIDTH)
        allowed = (rows[:, None] < length) & (rows[None, :] < length)
        out = _context(q, k, v, allowed, SEED, program, rows, scale, dropout, BLOCK, DROPS)
        at = OUT + h * oh + (first + rows)[:, None] * ol + cols[None, :]
        tl.store(at, out.to(v.dtype), mask=rows[:, None] < length)


@triton.jit
def _backward(
    Q, K, V, BOUNDS, SEED, DO, DQ, DK, DV, SUMS, heads, batch, capacity, scale, dropout,
    qh, ql, kh, kl, vh, vl, oh, ol, gh, gl,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, DROPS: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    b, h = program // heads, (program % heads).to(tl.int64)
    start = tl.load(BOUNDS + b)
    if b == batch:
        _clear(DQ, h * gh, gl, start, capacity, BLOCK, WIDTH)
        _clear(DK, h * gh, gl, start, capacity, BLOCK, WIDTH)
        _clear(DV, h * gh, gl, start, capacity, BLOCK, WIDTH)
    else:
        length = tl.load(BOUNDS + b + 1) - start
        first = start.to(tl.int64)
        rows, cols = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
        q = _tile(Q, h * qh + first * ql, ql, rows, cols, length, WIDTH)
        k = _tile(K, h * kh + first * kl, kl, rows, cols, length, WIDTH)
        v = _tile(V, h * vh + first * vl, vl, rows, cols, length, WIDTH)
        do = _tile(DO, h * oh + first * ol, ol, rows, cols, length, WIDTH)
        allowed = (rows[:, None] < length) & (rows[None, :] < length)
        dq, dk, dv = _gradients(q, k, v, do, allowed, SEED, program, rows, scale, dropout, BLOCK, DROPS)
        at = h * gh + (first + rows)[:, None] * gl + cols[None, :]
        real = rows[:, None] < length
        tl.store(DQ + at, dq.to(q.dtype), mask=real)
        tl.store(DK + at, dk.to(q.dtype), mask=real)
        tl.store(DV + at, dv.to(q.dtype), mask=real)
        if SUMMED:  # beyond the row the gradients are 0
            total = SUMS + (b.to(tl.int64) * 3 * heads + h) * WIDTH + cols
            tl.store(total, tl.sum(dq, 0))
            tl.store(total + heads * WIDTH, tl.sum(dk, 0))
            tl.store(total + 2 * heads * WIDTH, tl.sum(dv, 0))


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(s for t in tensors for s in t.stride()[1:3])


def launch_forward(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, seed: Tensor, out: Tensor,
    longest: int, scale: float, dropout: float,
) -> None:  # fmt: skip
    """Fill `out`, ``[1, H, C, D]``; arguments as those of `varlen_attention`."""
    _, heads, capacity, width = query.shape
    batch, block = len(bounds) - 1, _block(longest)
    _forward[((batch + 1) * heads,)](
        query, key, value, bounds, seed, out, heads, batch, capacity, scale, dropout,
        *_strides(query, key, value, out),
        BLOCK=block, WIDTH=width, DROPS=dropout > 0, num_warps=_warps(block),
    )  # fmt: skip


def launch_backward(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, seed: Tensor, grad: Tensor,
    dq: Tensor, dk: Tensor, dv: Tensor, longest: int, scale: float, dropout: float, sums: Tensor | None = None,
) -> None:  # fmt: skip
    """Fill `dq`, `dk` and `dv`, ``[1, H, C, D]`` of equal strides, and `sums` [B, 3, H, D] with their sums."""
    _, heads, capacity, width = query.shape
    batch, block = len(bounds) - 1, _block(longest)
    _backward[((batch + 1) * heads,)](
        query, key, value, bounds, seed, grad, dq, dk, dv, dq if sums is None else sums, heads, batch, capacity,
        scale, dropout, *_strides(query, key, value, grad, dq),
        BLOCK=block, WIDTH=width, DROPS=dropout > 0, SUMMED=sums is not None, num_warps=max(2, _warps(block)),
    )  # fmt: skip
