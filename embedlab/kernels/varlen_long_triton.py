"""The Triton kernels of `embedlab.kernels.varlen_attention` for rows of more than 128 tokens, in tiles of 64 by 64.

As FlashAttention (Dao et al. 2022): a program holds 64 queries of a head and walks along the keys of their row, with a
soft-max that is rescaled on the way. The backward pass makes the soft-max's sums again, so that nothing is kept of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from embedlab.kernels.varlen_triton import _ROUNDS, _clear, _strides, _tile

_BLOCK = 64


@triton.jit
def _kept(seed, program, rows, at, dropout, LONGEST: tl.constexpr, BLOCK: tl.constexpr):
    """1 / (1 - p) where the weight of a query and a key [BLOCK, BLOCK] is kept, else 0; keys from `at` on."""
    quarter: tl.constexpr = BLOCK // 4
    counter = (program * LONGEST + rows[:, None]) * (LONGEST // 4) + at // 4 + tl.arange(0, quarter)[None, :]
    a, b, c, d = tl.rand4x(seed, counter, _ROUNDS)
    drawn = tl.interleave(tl.interleave(a, b), tl.interleave(c, d))
    return tl.where(drawn >= dropout, 1.0 / (1.0 - dropout), 0.0)


@triton.jit
def _scores(q, k, keys, length, scale):
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    return tl.where(keys[None, :] < length, scores, -1.0e30)


@triton.jit
def _forward(
    Q, K, V, BOUNDS, SEED, OUT, heads, batch, capacity, scale, dropout,
    qh, ql, kh, kl, vh, vl, oh, ol,
    LONGEST: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    program, block = tl.program_id(0), tl.program_id(1)
    b, h = program // heads, (program % heads).to(tl.int64)
    start = tl.load(BOUNDS + b)
    if b == batch:
        if block == 0:
            _clear(OUT, h * oh, ol, start, capacity, BLOCK, WIDTH)
    else:
        length = tl.load(BOUNDS + b + 1) - start
        first = start.to(tl.int64)
        number, cols = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
        rows = block * BLOCK + number
        if block * BLOCK < length:
            q = _tile(Q, h * qh + first * ql, ql, rows, cols, length, WIDTH)
            top, total = tl.full([BLOCK], -1.0e30, tl.float32), tl.zeros([BLOCK], tl.float32)
            context = tl.zeros([BLOCK, WIDTH], tl.float32)
            at = 0
            while at < length:
                keys = at + number
                k = _tile(K, h * kh + first * kl, kl, keys, cols, length, WIDTH)
                v = _tile(V, h * vh + first * vl, vl, keys, cols, length, WIDTH)
                scores = _scores(q, k, keys, length, scale)
                higher = tl.maximum(top, tl.max(scores, 1))
                grown, shrink = tl.exp(scores - higher[:, None]), tl.exp(top - higher)
                total = total * shrink + tl.sum(grown, 1)
                if DROPS:
                    grown = grown * _kept(tl.load(SEED), program, rows, at, dropout, LONGEST, BLOCK)
                context = context * shrink[:, None] + tl.dot(grown.to(v.dtype), v, input_precision="ieee")
                top = higher
                at += BLOCK
            out = OUT + h * oh + (first + rows)[:, None] * ol + cols[None, :]
            tl.store(out, (context / total[:, None]).to(q.dtype), mask=rows[:, None] < length)


@triton.jit
def _backward_of_queries(
    Q, K, V, BOUNDS, SEED, DO, DQ, SUMS, INNER, heads, batch, capacity, scale, dropout,
    qh, ql, kh, kl, vh, vl, oh, ol, gh, gl,
    LONGEST: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """Besides, of each query: the logarithm of its soft-max's sum, and its weights times their gradients."""
    program, block = tl.program_id(0), tl.program_id(1)
    b, h = program // heads, (program % heads).to(tl.int64)
    start = tl.load(BOUNDS + b)
    if b == batch:
        if block == 0:
            _clear(DQ, h * gh, gl, start, capacity, BLOCK, WIDTH)
    else:
        length = tl.load(BOUNDS + b + 1) - start
        first = start.to(tl.int64)
        number, cols = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
        rows = block * BLOCK + number
        if block * BLOCK < length:
            q = _tile(Q, h * qh + first * ql, ql, rows, cols, length, WIDTH)
            do = _tile(DO, h * oh + first * ol, ol, rows, cols, length, WIDTH)
            top, total = tl.full([BLOCK], -1.0e30, tl.float32), tl.zeros([BLOCK], tl.float32)
            inner = tl.zeros([BLOCK], tl.float32)
            at = 0
            while at < length:
                keys = at + number
                k = _tile(K, h * kh + first * kl, kl, keys, cols, length, WIDTH)
                v = _tile(V, h * vh + first * vl, vl, keys, cols, length, WIDTH)
                scores = _scores(q, k, keys, length, scale)
                dp = tl.dot(do, tl.trans(v), input_precision="ieee")
                if DROPS:
                    dp = dp * _kept(tl.load(SEED), program, rows, at, dropout, LONGEST, BLOCK)
                higher = tl.maximum(top, tl.max(scores, 1))
                grown, shrink = tl.exp(scores - higher[:, None]), tl.exp(top - higher)
                total = total * shrink + tl.sum(grown, 1)
                inner = inner * shrink + tl.sum(grown * dp, 1)
                top = higher
                at += BLOCK
            logarithm, inner = top + tl.log(total), inner / total
            place = h * capacity + first + rows
            tl.store(SUMS + place, logarithm, mask=rows < length)
            tl.store(INNER + place, inner, mask=rows < length)
            dq = tl.zeros([BLOCK, WIDTH], tl.float32)
            at = 0
            while at < length:
                keys = at + number
                k = _tile(K, h * kh + first * kl, kl, keys, cols, length, WIDTH)
                v = _tile(V, h * vh + first * vl, vl, keys, cols, length, WIDTH)
                p = tl.exp(_scores(q, k, keys, length, scale) - logarithm[:, None])
                dp = tl.dot(do, tl.trans(v), input_precision="ieee")
                if DROPS:
                    dp = dp * _kept(tl.load(SEED), program, rows, at, dropout, LONGEST, BLOCK)
                ds = (p * (dp - inner[:, None]) * scale).to(q.dtype)
                dq += tl.dot(ds, k, input_precision="ieee")
                at += BLOCK
            out = DQ + h * gh + (first + rows)[:, None] * gl + cols[None, :]
            tl.store(out, dq.to(q.dtype), mask=rows[:, None] < length)


@triton.jit
def _backward_of_keys(
    Q, K, V, BOUNDS, SEED, DO, DK, DV, SUMS, INNER, heads, batch, capacity, scale, dropout,
    qh, ql, kh, kl, vh, vl, oh, ol, gh, gl,
    LONGEST: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    program, block = tl.program_id(0), tl.program_id(1)
    b, h = program // heads, (program % heads).to(tl.int64)
    start = tl.load(BOUNDS + b)
    if b == batch:
        if block == 0:
            _clear(DK, h * gh, gl, start, capacity, BLOCK, WIDTH)
            _clear(DV, h * gh, gl, start, capacity, BLOCK, WIDTH)
    else:
        length = tl.load(BOUNDS + b + 1) - start
        first = start.to(tl.int64)
        number, cols = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
        own = block * BLOCK
        keys = own + number
        if own < length:
            k = _tile(K, h * kh + first * kl, kl, keys, cols, length, WIDTH)
            v = _tile(V, h * vh + first * vl, vl, keys, cols, length, WIDTH)
            dk, dv = tl.zeros([BLOCK, WIDTH], tl.float32), tl.zeros([BLOCK, WIDTH], tl.float32)
            at = 0
            while at < length:
                rows = at + number
                q = _tile(Q, h * qh + first * ql, ql, rows, cols, length, WIDTH)
                do = _tile(DO, h * oh + first * ol, ol, rows, cols, length, WIDTH)
                place = h * capacity + first + rows
                logarithm = tl.load(SUMS + place, mask=rows < length, other=0.0)
                inner = tl.load(INNER + place, mask=rows < length, other=0.0)
                # Beyond the row queries and gradients are 0, and so is what they add.
                p = tl.exp(_scores(q, k, keys, length, scale) - logarithm[:, None])
                dp = tl.dot(do, tl.trans(v), input_precision="ieee")
                dropped = p
                if DROPS:
                    kept = _kept(tl.load(SEED), program, rows, own, dropout, LONGEST, BLOCK)
                    dropped = p * kept
                    dp = dp * kept
                dv += tl.dot(tl.trans(dropped.to(v.dtype)), do, input_precision="ieee")
                ds = (p * (dp - inner[:, None]) * scale).to(q.dtype)
                dk += tl.dot(tl.trans(ds), q, input_precision="ieee")
                at += BLOCK
            out = h * gh + (first + keys)[:, None] * gl + cols[None, :]
            tl.store(DK + out, dk.to(k.dtype), mask=keys[:, None] < length)
            tl.store(DV + out, dv.to(v.dtype), mask=keys[:, None] < length)


def _check(query: Tensor, key: Tensor, causal: bool) -> None:
    if causal or query.shape != key.shape:
        raise ValueError(
            "rows of more than 128 tokens are for encoders, which have a key for each query head"
        )


def launch_forward(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, seed: Tensor, out: Tensor,
    longest: int, scale: float, dropout: float, causal: bool = False,
) -> None:  # fmt: skip
    """Fill `out`, ``[1, H, C, D]``; arguments as those of `varlen_attention`, `longest` a power of two from 64."""
    _check(query, key, causal)
    _, heads, capacity, width = query.shape
    batch = len(bounds) - 1
    _forward[((batch + 1) * heads, longest // _BLOCK)](
        query, key, value, bounds, seed, out, heads, batch, capacity, scale, dropout,
        *_strides(query, key, value, out),
        LONGEST=longest, BLOCK=_BLOCK, WIDTH=width, DROPS=dropout > 0, num_warps=4,
    )  # fmt: skip


def launch_backward(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, seed: Tensor, grad: Tensor,
    dq: Tensor, dk: Tensor, dv: Tensor, longest: int, scale: float, dropout: float, sums: Tensor | None = None,
    causal: bool = False,
) -> None:  # fmt: skip
    """Fill `dq`, `dk` and `dv`, ``[1, H, C, D]`` of equal strides, and `sums` [B, 3, H, D]: all of them in the first
    row."""
    _check(query, key, causal)
    _, heads, capacity, width = query.shape
    batch = len(bounds) - 1
    kept = torch.empty(2, heads, capacity, dtype=torch.float32, device=query.device)
    grid = ((batch + 1) * heads, longest // _BLOCK)
    shared = heads, batch, capacity, scale, dropout, *_strides(query, key, value, grad, dq)
    constants = {"LONGEST": longest, "BLOCK": _BLOCK, "WIDTH": width, "DROPS": dropout > 0, "num_warps": 4}
    inputs = query, key, value, bounds, seed, grad
    _backward_of_queries[grid](*inputs, dq, kept[0], kept[1], *shared, **constants)
    _backward_of_keys[grid](*inputs, dk, dv, kept[0], kept[1], *shared, **constants)
    if sums is not None:
        sums[1:] = 0
        for i, x in enumerate((dq, dk, dv)):
            sums[0, i] = x[0].sum(1, dtype=torch.float32)
