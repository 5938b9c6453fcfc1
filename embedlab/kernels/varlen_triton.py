"""The Triton kernels of `embedlab.kernels.varlen_attention`: one program holds a whole head of a whole row.

As `embedlab.kernels.short_attention`, with rows of different lengths one after another. One more program for each
head fills the slots that belong to no row with 0. Several query heads may share a head of keys and values: its
gradients are summed by one program, which computes those of all these queries.
"""

from __future__ import annotations

import torch
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
def _allowed(rows, length, CAUSAL: tl.constexpr):
    """Which keys [BLOCK, BLOCK] a query of the row may see."""
    allowed = (rows[:, None] < length) & (rows[None, :] < length)
    if CAUSAL:
        allowed = allowed & (rows[:, None] >= rows[None, :])
    return allowed


@triton.jit
def _forward(
    Q, K, V, BOUNDS, SEED, OUT, heads, batch, capacity, scale, dropout,
    qh, ql, kh, kl, vh, vl, oh, ol,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, DROPS: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    b, h = program // heads, (program % heads).to(tl.int64)
    shared = h // GROUP
    start = tl.load(BOUNDS + b)
    if b == batch:
        _clear(OUT, h * oh, ol, start, capacity, BLOCK, WIDTH)
    else:
        length = tl.load(BOUNDS + b + 1) - start
        first = start.to(tl.int64)
        rows, cols = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
        q = _tile(Q, h * qh + first * ql, ql, rows, cols, length, WIDTH)
        k = _tile(K, shared * kh + first * kl, kl, rows, cols, length, WIDTH)
        v = _tile(V, shared * vh + first * vl, vl, rows, cols, length, WIDTH)
        allowed = _allowed(rows, length, CAUSAL)
        out = _context(q, k, v, allowed, SEED, program, rows, scale, dropout, BLOCK, DROPS)
        at = OUT + h * oh + (first + rows)[:, None] * ol + cols[None, :]
        tl.store(at, out.to(v.dtype), mask=rows[:, None] < length)


@triton.jit
def _backward(
    Q, K, V, BOUNDS, SEED, DO, DQ, DK, DV, SUMS, heads, batch, capacity, scale, dropout,
    qh, ql, kh, kl, vh, vl, oh, ol, gh, gl, sh, sl,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, DROPS: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr,
    SUMMED: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    groups = heads // GROUP
    b, shared = program // groups, (program % groups).to(tl.int64)
    start = tl.load(BOUNDS + b)
    if b == batch:
        for n in tl.static_range(GROUP):
            _clear(DQ, (shared * GROUP + n) * gh, gl, start, capacity, BLOCK, WIDTH)
        _clear(DK, shared * sh, sl, start, capacity, BLOCK, WIDTH)
        _clear(DV, shared * sh, sl, start, capacity, BLOCK, WIDTH)
    else:
        length = tl.load(BOUNDS + b + 1) - start
        first = start.to(tl.int64)
        rows, cols = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
        k = _tile(K, shared * kh + first * kl, kl, rows, cols, length, WIDTH)
        v = _tile(V, shared * vh + first * vl, vl, rows, cols, length, WIDTH)
        allowed = _allowed(rows, length, CAUSAL)
        real = rows[:, None] < length
        dk, dv = tl.zeros([BLOCK, WIDTH], tl.float32), tl.zeros([BLOCK, WIDTH], tl.float32)
        for n in tl.static_range(GROUP):
            h = shared * GROUP + n
            q = _tile(Q, h * qh + first * ql, ql, rows, cols, length, WIDTH)
            do = _tile(DO, h * oh + first * ol, ol, rows, cols, length, WIDTH)
            drawn = b * heads + h.to(tl.int32)  # the program of the forward pass
            dq, of_key, of_value = _gradients(
                q, k, v, do, allowed, SEED, drawn, rows, scale, dropout, BLOCK, DROPS
            )
            dk += of_key
            dv += of_value
            tl.store(DQ + h * gh + (first + rows)[:, None] * gl + cols[None, :], dq.to(q.dtype), mask=real)
            if SUMMED:  # beyond the row the gradients are 0
                tl.store(SUMS + (b.to(tl.int64) * 3 * heads + h) * WIDTH + cols, tl.sum(dq, 0))
        at = shared * sh + (first + rows)[:, None] * sl + cols[None, :]
        tl.store(DK + at, dk.to(k.dtype), mask=real)
        tl.store(DV + at, dv.to(k.dtype), mask=real)
        if SUMMED:  # GROUP is 1
            total = SUMS + (b.to(tl.int64) * 3 * heads + shared) * WIDTH + cols
            tl.store(total + heads * WIDTH, tl.sum(dk, 0))
            tl.store(total + 2 * heads * WIDTH, tl.sum(dv, 0))


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(s for t in tensors for s in t.stride()[1:3])


def launch_forward(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, seed: Tensor, out: Tensor,
    longest: int, scale: float, dropout: float, causal: bool = False,
) -> None:  # fmt: skip
    """Fill `out`, ``[1, H, C, D]``; arguments as those of `varlen_attention`."""
    _, heads, capacity, width = query.shape
    batch, block = len(bounds) - 1, _block(longest)
    _forward[((batch + 1) * heads,)](
        query, key, value, bounds, seed, out, heads, batch, capacity, scale, dropout,
        *_strides(query, key, value, out),
        BLOCK=block, WIDTH=width, DROPS=dropout > 0, GROUP=heads // key.shape[1], CAUSAL=causal,
        num_warps=_warps(block),
    )  # fmt: skip


def launch_backward(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, seed: Tensor, grad: Tensor,
    dq: Tensor, dk: Tensor, dv: Tensor, longest: int, scale: float, dropout: float, sums: Tensor | None = None,
    causal: bool = False,
) -> None:  # fmt: skip
    """Fill `dq`, `dk` and `dv` (the last two of equal strides), and `sums` [B, 3, H, D] with their sums.

    Sums are for queries, keys and values of as many heads.
    """
    _, heads, capacity, width = query.shape
    batch, block, shared = len(bounds) - 1, _block(longest), key.shape[1]
    if query.dtype == torch.float32 and shared < heads:
        # All queries of a group in one program of fp32 are too much for its memory, and take minutes to compile.
        keys, values = (x.repeat_interleave(heads // shared, 1) for x in (key, value))
        wide = [torch.empty_like(keys) for _ in range(2)]
        launch_backward(
            query, keys, values, bounds, seed, grad, dq, wide[0], wide[1], longest, scale, dropout, None, causal
        )  # fmt: skip
        for out, x in zip((dk, dv), wide, strict=True):
            out.copy_(x.view(1, shared, -1, capacity, width).sum(2))
        return
    _backward[((batch + 1) * shared,)](
        query, key, value, bounds, seed, grad, dq, dk, dv, dq if sums is None else sums, heads, batch, capacity,
        scale, dropout, *_strides(query, key, value, grad, dq, dk),
        BLOCK=block, WIDTH=width, DROPS=dropout > 0, GROUP=heads // shared, CAUSAL=causal,
        SUMMED=sums is not None, num_warps=max(2, _warps(block)),
    )  # fmt: skip
