"""The Triton kernels of `embedlab.kernels.varlen_attention`: one program holds a whole head of a whole row.

Flash kernels work in tiles of 64 to 128 queries. Sentences of 32 tokens leave most of a tile empty, and attention
then takes as long as the feed-forward products. Here scores, dropout and soft-max of one head never leave the chip,
and the backward pass computes them again.

One more program for each head fills the slots that belong to no row with 0. Several query heads may share a head of
keys and values: its gradients are summed by one program, which computes those of all these queries.

Products of fp32 are fp32 ones ("ieee"; Triton would take TF32), as precision=32-true says. Those of bf16 are what they
are anyway.

Dropout draws from a seed that is a tensor, made by the device's generator: inside a CUDA graph each replay has
another one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROUNDS = tl.constexpr(
    6
)  # of Philox; six pass the usual tests of randomness, ten are twice the cost of a head


@triton.jit
def _tile(base, head, row_stride, rows, cols, length, WIDTH: tl.constexpr):
    """A head's [BLOCK, WIDTH] values; rows beyond the sequence are 0."""
    return tl.load(
        base + head + rows[:, None] * row_stride + cols[None, :], mask=rows[:, None] < length, other=0.0
    )


@triton.jit
def _weights(q, k, allowed, scale, BLOCK: tl.constexpr):
    """Soft-max of the allowed scores, fp32; a row with none is 0."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(allowed, scores, -1.0e30)
    top = tl.max(scores, 1)
    grown = tl.where(allowed, tl.exp(scores - top[:, None]), 0.0)
    total = tl.sum(grown, 1)
    return grown / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit
def _kept(seed, program, rows, dropout, BLOCK: tl.constexpr):
    """1 / (1 - p) where an attention weight [BLOCK, BLOCK] is kept, else 0."""
    # A call of Philox gives four numbers; to take one of them made these draws half of a short head's time.
    quarter: tl.constexpr = BLOCK // 4
    counter = (program * BLOCK + rows[:, None]) * quarter + tl.arange(0, quarter)[None, :]
    a, b, c, d = tl.rand4x(seed, counter, _ROUNDS)
    drawn = tl.interleave(tl.interleave(a, b), tl.interleave(c, d))
    return tl.where(drawn >= dropout, 1.0 / (1.0 - dropout), 0.0)


@triton.jit
def _context(q, k, v, allowed, SEED, program, rows, scale, dropout, BLOCK: tl.constexpr, DROPS: tl.constexpr):
    """Soft-max attention of one head of one row, [BLOCK, WIDTH] in fp32."""
    p = _weights(q, k, allowed, scale, BLOCK)
    if DROPS:
        p = p * _kept(tl.load(SEED), program, rows, dropout, BLOCK)
    return tl.dot(p.to(v.dtype), v, input_precision="ieee")


@triton.jit
def _gradients(
    q, k, v, do, allowed, SEED, program, rows, scale, dropout, BLOCK: tl.constexpr, DROPS: tl.constexpr
):
    """Of query, key and value of one head of one row, from that of its context; fp32."""
    p = _weights(q, k, allowed, scale, BLOCK)
    dp = tl.dot(do, tl.trans(v), input_precision="ieee")
    dropped = p
    if DROPS:
        kept = _kept(tl.load(SEED), program, rows, dropout, BLOCK)
        dropped = p * kept
        dp = dp * kept
    dv = tl.dot(tl.trans(dropped.to(v.dtype)), do, input_precision="ieee")
    ds = (p * (dp - tl.sum(p * dp, 1)[:, None]) * scale).to(q.dtype)
    return tl.dot(ds, k, input_precision="ieee"), tl.dot(tl.trans(ds), q, input_precision="ieee"), dv


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


def _block(length: int) -> int:
    return max(16, triton.next_power_of_2(length))


def _warps(block: int) -> int:
    return {16: 1, 32: 1, 64: 4, 128: 8}[block]


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
