"""Triton kernels between the matrix products of a decoder's block with LoRA, for `embedlab.kernels.fused_decoder`.

A norm, or SwiGLU, and the masked down-products of all updates that read its result are one kernel; so are SwiGLU's
gradient and those of the matrices beside it, and the gradients of all other matrices of a block. Masks are drawn and
kept as in `embedlab.kernels.lora_triton`. Widths are multiples of 64; there are at most three updates of one input.

Gradients of A and B are sums over tokens: each program writes its share, and `_total` adds the shares in a fixed order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from embedlab.kernels.lora_triton import draw_masks, masked

WIDE = 64
"""Columns at once; every width is a multiple."""
PARTS = 16
"""Shares of the tokens that programs sum for themselves."""


@triton.jit
def _kept(x, BITS, update, tokens, width: tl.constexpr, rows, first, DROPPED: tl.constexpr):
    """x where the update's mask keeps it, without the scale."""
    return masked(x, BITS, update, tokens, width, rows, first) if DROPPED > 0 else x


@triton.jit
def _add_down(
    total, x, A, BITS, update, tokens, width: tl.constexpr, rows, first, DROPPED: tl.constexpr,
    RANK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """h of one update, to which columns `first` and so on of x add theirs."""
    ranks, cols = tl.arange(0, RANK), first + tl.arange(0, WIDE)
    a = tl.load(A + (update * RANK + ranks[:, None]) * width + cols[None, :])
    kept = _kept(x, BITS, update, tokens, width, rows, first, DROPPED)
    return total + tl.dot(kept, tl.trans(a), input_precision="ieee")


@triton.jit
def _store_h(
    total, OUT, rows, tokens, stride, width: tl.constexpr, update, DROPPED: tl.constexpr, RANK: tl.constexpr
):
    place = OUT + rows[:, None].to(tl.int64) * stride + width + update * RANK + tl.arange(0, RANK)[None, :]
    h = total * (65536 / (65536 - DROPPED))
    tl.store(place, h.to(OUT.dtype.element_ty), mask=rows[:, None] < tokens)


@triton.jit
def _norm_down(
    X, MORE, GAMMA, A, SEED, SUM, OUT, BITS, ROOTS, tokens, eps, stride, width: tl.constexpr,
    UPDATES: tl.constexpr, DROPPED: tl.constexpr, RANK: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
    ADDS: tl.constexpr,
):  # fmt: skip
    """The residual stream with what is added to it, its RMS norm, and beside that the h of the updates."""
    top = tl.program_id(0) * TALL
    rows, cols = top + tl.arange(0, TALL), tl.arange(0, WIDE)
    at = rows[:, None].to(tl.int64)
    real = rows[:, None] < tokens
    if DROPPED > 0:
        for update in tl.static_range(UPDATES):
            draw_masks(BITS, SEED, update, top, tokens, width, DROPPED, TALL)
    squares = tl.zeros([TALL, WIDE], tl.float32)
    for first in range(0, width, WIDE):
        place = at * width + first + cols[None, :]
        x = tl.load(X + place, mask=real, other=0.0)
        if ADDS:
            x += tl.load(MORE + place, mask=real, other=0.0)
            tl.store(SUM + place, x, mask=real)
        squares += x * x
    root = 1.0 / tl.sqrt(tl.sum(squares, 1) / width + eps)
    tl.store(ROOTS + rows, root, mask=rows < tokens)
    tl.debug_barrier()  # other threads read what one has stored
    t0 = tl.zeros([TALL, RANK], tl.float32)
    t1, t2 = t0, t0
    for first in range(0, width, WIDE):
        x = tl.load(SUM + at * width + first + cols[None, :], mask=real, other=0.0)
        gamma = tl.load(GAMMA + first + cols)
        n = (x * root[:, None] * gamma[None, :]).to(OUT.dtype.element_ty)
        tl.store(OUT + at * stride + first + cols[None, :], n, mask=real)
        if UPDATES > 0:
            t0 = _add_down(t0, n, A, BITS, 0, tokens, width, rows, first, DROPPED, RANK, WIDE)
        if UPDATES > 1:
            t1 = _add_down(t1, n, A, BITS, 1, tokens, width, rows, first, DROPPED, RANK, WIDE)
        if UPDATES > 2:
            t2 = _add_down(t2, n, A, BITS, 2, tokens, width, rows, first, DROPPED, RANK, WIDE)
    if UPDATES > 0:
        _store_h(t0, OUT, rows, tokens, stride, width, 0, DROPPED, RANK)
    if UPDATES > 1:
        _store_h(t1, OUT, rows, tokens, stride, width, 1, DROPPED, RANK)
    if UPDATES > 2:
        _store_h(t2, OUT, rows, tokens, stride, width, 2, DROPPED, RANK)


@triton.jit
def _down(
    GATES, A, SEED, OUT, BITS, tokens, stride, width: tl.constexpr, DROPPED: tl.constexpr, RANK: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """The h of one update beside its input, which stands in OUT or (`GATED`) is SwiGLU of gates and values."""
    top = tl.program_id(0) * TALL
    rows, cols = top + tl.arange(0, TALL), tl.arange(0, WIDE)
    at = rows[:, None].to(tl.int64)
    real = rows[:, None] < tokens
    if DROPPED > 0:
        draw_masks(BITS, SEED, 0, top, tokens, width, DROPPED, TALL)
        tl.debug_barrier()
    total = tl.zeros([TALL, RANK], tl.float32)
    for first in range(0, width, WIDE):
        place = at * stride + first + cols[None, :]
        if GATED:
            gate_at = GATES + at * (2 * width) + first + cols[None, :]
            g = tl.load(gate_at, mask=real, other=0.0).to(tl.float32)
            u = tl.load(gate_at + width, mask=real, other=0.0).to(tl.float32)
            x = (g * tl.sigmoid(g) * u).to(OUT.dtype.element_ty)
            tl.store(OUT + place, x, mask=real)
        else:
            x = tl.load(OUT + place, mask=real, other=0.0)
        total = _add_down(total, x, A, BITS, 0, tokens, width, rows, first, DROPPED, RANK, WIDE)
    _store_h(total, OUT, rows, tokens, stride, width, 0, DROPPED, RANK)


@triton.jit
def _add_up(
    total, h, A, BITS, update, tokens, width: tl.constexpr, rows, first, DROPPED: tl.constexpr,
    RANK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Columns `first` and so on of x's gradient, to which that of one update's h adds its share, unscaled."""
    ranks, cols = tl.arange(0, RANK), first + tl.arange(0, WIDE)
    a = tl.load(A + (update * RANK + ranks[:, None]) * width + cols[None, :])
    part = tl.dot(h, a, input_precision="ieee")
    return total + _kept(part, BITS, update, tokens, width, rows, first, DROPPED)


@triton.jit
def _norm_backward(
    ABOVE, A, BITS, X, ROOTS, GAMMA, GRAD, OUT, HALF, tokens, stride, width: tl.constexpr, UPDATES: tl.constexpr,
    DROPPED: tl.constexpr, RANK: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """The gradient of the residual stream: what comes by the norm, and (`ADDS`) what passes it by.

    ABOVE has the norm's gradient by way of the frozen weights and those of the updates' h. The result goes to OUT, and
    to HALF in the type of products.
    """
    rows, cols, ranks = (
        tl.program_id(0) * TALL + tl.arange(0, TALL), tl.arange(0, WIDE), tl.arange(0, RANK)
    )  # fmt: skip
    at = rows[:, None].to(tl.int64)
    real = rows[:, None] < tokens
    root = tl.load(ROOTS + rows, mask=rows < tokens, other=0.0)[:, None]
    of_h = ABOVE + at * stride + width + ranks[None, :]
    if UPDATES > 0:
        h0 = tl.load(of_h, mask=real, other=0.0)
    if UPDATES > 1:
        h1 = tl.load(of_h + RANK, mask=real, other=0.0)
    if UPDATES > 2:
        h2 = tl.load(of_h + 2 * RANK, mask=real, other=0.0)
    along = tl.zeros([TALL, WIDE], tl.float32)
    for first in range(0, width, WIDE):
        place = at * width + first + cols[None, :]
        share = tl.zeros([TALL, WIDE], tl.float32)
        if UPDATES > 0:
            share = _add_up(share, h0, A, BITS, 0, tokens, width, rows, first, DROPPED, RANK, WIDE)
        if UPDATES > 1:
            share = _add_up(share, h1, A, BITS, 1, tokens, width, rows, first, DROPPED, RANK, WIDE)
        if UPDATES > 2:
            share = _add_up(share, h2, A, BITS, 2, tokens, width, rows, first, DROPPED, RANK, WIDE)
        frozen = tl.load(ABOVE + at * stride + first + cols[None, :], mask=real, other=0.0).to(tl.float32)
        inner = (frozen + share * (65536 / (65536 - DROPPED))) * tl.load(GAMMA + first + cols)[None, :]
        along += inner * tl.load(X + place, mask=real, other=0.0) * root
        tl.store(OUT + place, inner, mask=real)
    mean = (tl.sum(along, 1) / width)[:, None]
    tl.debug_barrier()
    for first in range(0, width, WIDE):
        place = at * width + first + cols[None, :]
        inner = tl.load(OUT + place, mask=real, other=0.0)
        normed = tl.load(X + place, mask=real, other=0.0) * root
        out = root * (inner - normed * mean)
        if ADDS:
            out += tl.load(GRAD + place, mask=real, other=0.0)
        tl.store(OUT + place, out, mask=real)
        tl.store(HALF + place, out.to(HALF.dtype.element_ty), mask=real)


@triton.jit
def _swiglu_backward(
    ABOVE, GATES, H, A, BITS, OUT, SHARES, tokens, stride, h_stride, total, of_a, of_b,
    width: tl.constexpr, DROPPED: tl.constexpr, RANK: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
    TURNS: tl.constexpr,
):  # fmt: skip
    """Gradients of gates and values in some columns, and shares of those of the matrices on both sides.

    ABOVE [T, width + R]: of SwiGLU by the frozen weights, and of h. H: the h of gates and of values. The shares go to
    `of_a` (A of the layer that reads SwiGLU) and `of_b` (B of gates, then of values) in a row of SHARES.
    """
    part, first = tl.program_id(1), tl.program_id(0) * WIDE
    cols, ranks = first + tl.arange(0, WIDE), tl.arange(0, RANK)
    scale = 65536 / (65536 - DROPPED)
    a = tl.load(A + ranks[:, None] * width + cols[None, :])
    sum_a = tl.zeros([RANK, WIDE], tl.float32)
    sum_g = tl.zeros([WIDE, RANK], tl.float32)
    sum_u = tl.zeros([WIDE, RANK], tl.float32)
    for turn in range(TURNS):
        rows = (part * TURNS + turn) * TALL + tl.arange(0, TALL)
        at = rows[:, None].to(tl.int64)
        real = rows[:, None] < tokens
        h = tl.load(ABOVE + at * stride + width + ranks[None, :], mask=real, other=0.0)
        d = tl.load(ABOVE + at * stride + cols[None, :], mask=real, other=0.0).to(tl.float32)
        up = tl.dot(h, a, input_precision="ieee")
        d += _kept(up, BITS, 0, tokens, width, rows, first, DROPPED) * scale
        gate_at = at * (2 * width) + cols[None, :]
        g = tl.load(GATES + gate_at, mask=real, other=0.0).to(tl.float32)
        u = tl.load(GATES + gate_at + width, mask=real, other=0.0).to(tl.float32)
        s = tl.sigmoid(g)
        dg = (d * u * s * (1.0 + g * (1.0 - s))).to(OUT.dtype.element_ty)
        du = (d * g * s).to(OUT.dtype.element_ty)
        tl.store(OUT + gate_at, dg, mask=real)
        tl.store(OUT + gate_at + width, du, mask=real)
        x = (g * s * u).to(OUT.dtype.element_ty)
        kept = _kept(x, BITS, 0, tokens, width, rows, first, DROPPED)
        sum_a += tl.dot(tl.trans(h), kept, input_precision="ieee")
        beside = H + at * h_stride + ranks[None, :]
        h_g = tl.load(beside, mask=real, other=0.0)
        h_u = tl.load(beside + RANK, mask=real, other=0.0)
        sum_g += tl.dot(tl.trans(dg), h_g, input_precision="ieee")
        sum_u += tl.dot(tl.trans(du), h_u, input_precision="ieee")
    row = SHARES + part.to(tl.int64) * total
    tl.store(row + of_a + ranks[:, None] * width + cols[None, :], sum_a * scale)
    place = row + of_b + cols[:, None] * RANK + ranks[None, :]
    tl.store(place, sum_g)
    tl.store(place + width * RANK, sum_u)


@triton.jit
def _of_down(
    X, x_stride, DH, h_stride, BITS, ROW, block, part, tokens, width: tl.constexpr, UPDATES: tl.constexpr,
    DROPPED: tl.constexpr, RANK: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """A share of some columns of the gradients of the A of all updates that read X; DH: those of their h."""
    first = block * WIDE
    cols, ranks = first + tl.arange(0, WIDE), tl.arange(0, RANK)
    t0 = tl.zeros([RANK, WIDE], tl.float32)
    t1, t2 = t0, t0
    for turn in range(TURNS):
        rows = (part * TURNS + turn) * TALL + tl.arange(0, TALL)
        at = rows[:, None].to(tl.int64)
        real = rows[:, None] < tokens
        x = tl.load(X + at * x_stride + cols[None, :], mask=real, other=0.0)
        beside = DH + at * h_stride + ranks[None, :]
        h = tl.load(beside, mask=real, other=0.0)
        kept = _kept(x, BITS, 0, tokens, width, rows, first, DROPPED)
        t0 += tl.dot(tl.trans(h), kept, input_precision="ieee")
        if UPDATES > 1:
            h = tl.load(beside + RANK, mask=real, other=0.0)
            kept = _kept(x, BITS, 1, tokens, width, rows, first, DROPPED)
            t1 += tl.dot(tl.trans(h), kept, input_precision="ieee")
        if UPDATES > 2:
            h = tl.load(beside + 2 * RANK, mask=real, other=0.0)
            kept = _kept(x, BITS, 2, tokens, width, rows, first, DROPPED)
            t2 += tl.dot(tl.trans(h), kept, input_precision="ieee")
    scale = 65536 / (65536 - DROPPED)
    place = ROW + ranks[:, None] * width + cols[None, :]
    tl.store(place, t0 * scale)
    if UPDATES > 1:
        tl.store(place + RANK * width, t1 * scale)
    if UPDATES > 2:
        tl.store(place + 2 * RANK * width, t2 * scale)


@triton.jit
def _of_up(
    DY, y_stride, H, h_stride, ROW, block, update, part, tokens, RANK: tl.constexpr, TALL: tl.constexpr,
    WIDE: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """A share of some rows of the gradient of B (of its scaled self): those of `block` of DY's columns."""
    cols, ranks = block * WIDE + tl.arange(0, WIDE), tl.arange(0, RANK)
    total = tl.zeros([WIDE, RANK], tl.float32)
    for turn in range(TURNS):
        rows = (part * TURNS + turn) * TALL + tl.arange(0, TALL)
        at = rows[:, None].to(tl.int64)
        real = rows[:, None] < tokens
        dy = tl.load(DY + at * y_stride + cols[None, :], mask=real, other=0.0)
        h = tl.load(H + at * h_stride + update * RANK + ranks[None, :], mask=real, other=0.0)
        total += tl.dot(tl.trans(dy), h, input_precision="ieee")
    tl.store(ROW + cols[:, None] * RANK + ranks[None, :], total)


@triton.jit
def _matrices(
    X, CONTEXT, Y, DH_X, DH_C, DH_Y, BITS_X, BITS_C, BITS_Y, DQKV, DO, DD, H_X, H_C, H_D, SHARES, tokens,
    x_stride, c_stride, y_stride, dx_stride, dc_stride, dy_stride, d_stride, total,
    of_x, of_c, of_y, of_bx, of_bc, of_bd, QUERY: tl.constexpr, KEY: tl.constexpr, width: tl.constexpr,
    DROPPED: tl.constexpr, RANK: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Shares of the gradients of a block's matrices, but for those of `_swiglu_backward`.

    X, CONTEXT, Y: inputs of query, key and value; of the output layer; of gate and up. DH: gradients of their h. DQKV,
    DO, DD: of the outputs of these layers and of the last one, whose inputs' h are H. QUERY, KEY: widths.
    """
    block, part = tl.program_id(0), tl.program_id(1)
    row = SHARES + part.to(tl.int64) * total
    x: tl.constexpr = width // WIDE
    c: tl.constexpr = x + QUERY // WIDE
    y: tl.constexpr = c + width // WIDE
    q: tl.constexpr = y + (QUERY + 2 * KEY) // WIDE
    o: tl.constexpr = q + width // WIDE
    if block < x:
        _of_down(X, x_stride, DH_X, dx_stride, BITS_X, row + of_x, block, part, tokens, width, 3,
                 DROPPED, RANK, TALL, WIDE, TURNS)  # fmt: skip
    elif block < c:
        _of_down(CONTEXT, c_stride, DH_C, dc_stride, BITS_C, row + of_c, block - x, part, tokens, QUERY, 1,
                 DROPPED, RANK, TALL, WIDE, TURNS)  # fmt: skip
    elif block < y:
        _of_down(Y, y_stride, DH_Y, dy_stride, BITS_Y, row + of_y, block - c, part, tokens, width, 2,
                 DROPPED, RANK, TALL, WIDE, TURNS)  # fmt: skip
    elif block < q:
        first = (block - y) * WIDE
        update = (first >= QUERY).to(tl.int32) + (first >= QUERY + KEY).to(tl.int32)
        _of_up(DQKV, QUERY + 2 * KEY, H_X, x_stride, row + of_bx, block - y, update, part, tokens,
               RANK, TALL, WIDE, TURNS)  # fmt: skip
    elif block < o:
        _of_up(DO, width, H_C, c_stride, row + of_bc, block - q, 0, part, tokens, RANK, TALL, WIDE, TURNS)
    else:
        _of_up(DD, width, H_D, d_stride, row + of_bd, block - o, 0, part, tokens, RANK, TALL, WIDE, TURNS)


@triton.jit
def _total(SHARES, OUT, total, ups, scale, PARTS: tl.constexpr, SIZE: tl.constexpr):
    """Sums of PARTS rows; from column `ups` on, where gradients are of scaled matrices, times `scale`."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    rows = tl.arange(0, PARTS)
    each = tl.load(SHARES + rows[:, None].to(tl.int64) * total + at[None, :], mask=at[None, :] < total, other=0.0)
    out = tl.sum(each, 0) * tl.where(at >= ups, scale, 1.0)
    tl.store(OUT + at, out, mask=at < total)


@triton.jit
def _refresh(PLACES, FACTORS, TENSORS, PIECES, OUT: tl.constexpr, SIZE: tl.constexpr):
    """One piece of one matrix, in the type of products and scaled, where they read it.

    PLACES: int64 [n, 5], addresses of the matrix and of its copy; elements; columns; and elements between the copy's
    rows. FACTORS: fp32 [n].
    """
    program = tl.program_id(0)
    tensor = tl.load(TENSORS + program).to(tl.int64)
    entry = PLACES + tensor * 5
    source = tl.load(entry).to(tl.pointer_type(tl.float32))
    copy = tl.load(entry + 1).to(tl.pointer_type(OUT))
    size, columns, stride = tl.load(entry + 2), tl.load(entry + 3), tl.load(entry + 4)
    at = tl.load(PIECES + program).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    x = tl.load(source + at, mask=at < size, other=0.0) * tl.load(FACTORS + tensor)
    tl.store(copy + at // columns * stride + at % columns, x.to(OUT), mask=at < size)


class Normed(NamedTuple):
    """What `norm_down` makes."""

    x: Tensor
    """The residual stream, fp32 ``[T, D]``."""
    joined: Tensor
    """Its norm and the h of the updates, ``[T, D + n R]``."""
    bits: Tensor
    """Masks of the updates' dropout, int32 ``[n, T, D / 32]``; without dropout without meaning."""
    roots: Tensor
    """fp32 [T], of the norm."""


class Updates(NamedTuple):
    """Those of one input: their A ``[n, R, D]`` in the type of products, dropout in 2^-16, seed int64 ``[1]``."""

    down: Tensor
    dropped: int
    seed: Tensor

    @property
    def sizes(self) -> tuple[int, int, int]:
        return tuple(self.down.shape)  # type: ignore[return-value]


def _bits(tokens: int, updates: Updates) -> Tensor:
    n, _, width = updates.sizes
    return updates.down.new_empty(n, tokens, width // 32 if updates.dropped else 0, dtype=torch.int32)


def norm_down(x: Tensor, more: Tensor | None, gamma: Tensor, eps: float, updates: Updates | None) -> Normed:
    """The RMS norm of ``x + more`` [T, D], fp32, and the h of the updates that read it; without updates in fp32."""
    tokens, width = x.shape
    n, rank, _ = (0, 16, 0) if updates is None else updates.sizes
    total = x if more is None else torch.empty_like(x)
    roots = x.new_empty(tokens)
    if updates is None:
        joined, bits, down, seed, dropped = torch.empty_like(x), x, x, x, 0
    else:
        joined, bits = updates.down.new_empty(tokens, width + n * rank), _bits(tokens, updates)
        down, dropped, seed = updates
    tall = 32
    _norm_down[(triton.cdiv(tokens, tall),)](
        x, x if more is None else more, gamma, down, seed, total, joined, bits, roots, tokens, eps, joined.stride(0),
        width, UPDATES=n, DROPPED=dropped, RANK=rank, TALL=tall, WIDE=WIDE, ADDS=more is not None,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return Normed(total, joined, bits, roots)


def down(joined: Tensor, updates: Updates, gates: Tensor | None = None) -> Tensor:
    """Fill the last columns of ``joined`` [T, D + R] with h of the first, or of SwiGLU of ``gates`` [T, 2 D], which the
    first ones get; gives the mask."""
    _, rank, width = updates.sizes
    tokens, bits, tall = len(joined), _bits(len(joined), updates), 32
    _down[(triton.cdiv(tokens, tall),)](
        joined if gates is None else gates, updates.down, updates.seed, joined, bits, tokens, joined.stride(0), width,
        DROPPED=updates.dropped, RANK=rank, TALL=tall, WIDE=WIDE, GATED=gates is not None, num_warps=4, num_stages=3,
    )  # fmt: skip
    return bits


def norm_backward(
    above: Tensor, normed: Normed, gamma: Tensor, updates: Updates | None, grad: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Gradient of the residual stream in fp32 and in `dtype`, ``[T, D]`` each.

    Args:
        above: ``[T, D + n R]``: of the norm by the frozen weights, and of the updates' h.
        normed, gamma, updates: of the forward.
        grad: fp32 ``[T, D]``, what passes the norm by.
        dtype: of products.
    """
    tokens, width = normed.x.shape
    n, rank, _ = (0, 16, 0) if updates is None else updates.sizes
    out, half, tall = torch.empty_like(normed.x), torch.empty_like(normed.x, dtype=dtype), 32
    _norm_backward[(triton.cdiv(tokens, tall),)](
        above, above if updates is None else updates.down, normed.bits, normed.x, normed.roots, gamma,
        out if grad is None else grad, out, half, tokens, above.stride(0), width, UPDATES=n,
        DROPPED=0 if updates is None else updates.dropped, RANK=rank, TALL=tall, WIDE=WIDE, ADDS=grad is not None,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return out, half


class Shares:
    """Gradients of all matrices of a block, and how programs share out the tokens.

    Args:
        sizes: elements of A of query, key and value; of the output layer; of gate and up; of down; and of B of the same.
        tokens: T.
        like: a tensor on the device.
    """

    def __init__(self, sizes: tuple[int, ...], tokens: int, like: Tensor) -> None:
        self.sizes = sizes
        self.at = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        self.tokens = tokens
        self.parts = like.new_empty(PARTS, self.at[-1], dtype=torch.float32)

    def turns(self, tall: int) -> int:
        """How often a program takes `tall` tokens."""
        return triton.cdiv(self.tokens, PARTS * tall)

    def total(self, scale: float) -> Tensor:
        """All gradients, flat fp32; those of B times `scale`."""
        total, size = self.at[-1], 256
        out = self.parts.new_empty(total)
        _total[(triton.cdiv(total, size),)](
            self.parts, out, total, self.at[4], scale, PARTS=PARTS, SIZE=size, num_warps=4
        )
        return out


def swiglu_backward(
    above: Tensor, gates: Tensor, h: Tensor, updates: Updates, bits: Tensor, shares: Shares
) -> Tensor:
    """Gradient of ``gates`` [T, 2 D], and its shares.

    Args:
        above: ``[T, D + R]``: of SwiGLU by the frozen weights, and of the h of the update that reads it.
        gates: of the forward.
        h: ``[T, 2 R]``, of the updates of gate and up.
        updates, bits: of the layer that reads SwiGLU.
        shares: of the block.
    """
    _, rank, width = updates.sizes
    out, tall = torch.empty_like(gates), 32
    _swiglu_backward[(width // WIDE, PARTS)](
        above, gates, h, updates.down, bits, out, shares.parts, len(gates), above.stride(0), h.stride(0),
        shares.at[-1], shares.at[3], shares.at[6], width, DROPPED=updates.dropped, RANK=rank, TALL=tall,
        WIDE=WIDE, TURNS=shares.turns(tall), num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


class Read(NamedTuple):
    """An input that updates read, ``[T, D + n R]`` with their h; its masks; and the gradients ``[T, n R]`` of h."""

    joined: Tensor
    bits: Tensor
    of_h: Tensor


def matrices(
    first: Read, context: Read, second: Read, fed: Tensor, above: tuple[Tensor, Tensor, Tensor], query: int, rank: int,
    dropped: int, shares: Shares,
) -> None:  # fmt: skip
    """All other shares.

    Args:
        first, context, second: inputs of query, key and value; of the output layer; of gate and up.
        fed: ``[T, at least R]``, whose first columns are the h of the last layer's update.
        above: gradients of the joined query, key and value; of the output layer's output; of the last layer's.
        query: features of all queries.
        rank, dropped: of all updates.
        shares: of the block.
    """
    of_qkv, of_o, of_d = above
    tokens, width = of_o.shape
    key = (of_qkv.shape[1] - query) // 2
    blocks = (2 * width + query + of_qkv.shape[1] + 2 * width) // WIDE
    at, tall = shares.at, 64
    _matrices[(blocks, PARTS)](
        first.joined, context.joined, second.joined, first.of_h, context.of_h, second.of_h,
        first.bits, context.bits, second.bits, of_qkv, of_o, of_d,
        first.joined[:, width:], context.joined[:, query:], fed, shares.parts, tokens,
        *(x.stride(0) for x in (first.joined, context.joined, second.joined, first.of_h, context.of_h, second.of_h, fed)),
        at[-1], at[0], at[1], at[2], at[4], at[5], at[7], QUERY=query, KEY=key, width=width, DROPPED=dropped, RANK=rank,
        TALL=tall, WIDE=WIDE, TURNS=shares.turns(tall), num_warps=4, num_stages=3,
    )  # fmt: skip


class Copies:
    """Matrices, each in another type, scaled, in a place of its own; `refresh` brings their present values.

    Args:
        pairs: of fp32 matrices, contiguous, and their places, whose columns are contiguous; of one type.
        factors: of the matrices.
    """

    def __init__(self, pairs: list[tuple[Tensor, Tensor]], factors: list[float]) -> None:
        self._kept, self._size = pairs, 1024
        device = pairs[0][1].device
        rows = [[a.data_ptr(), b.data_ptr(), a.numel(), b.shape[-1], b.stride(-2)] for a, b in pairs]
        counts = torch.tensor([-(-a.numel() // self._size) for a, _ in pairs])
        tensors = torch.repeat_interleave(torch.arange(len(counts)), counts)
        pieces = torch.arange(len(tensors)) - (counts.cumsum(0) - counts)[tensors]
        self._places, self._factors = torch.tensor(rows, device=device), torch.tensor(factors, device=device)
        self._tensors, self._pieces = tensors.int().to(device), pieces.int().to(device)
        self._type = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}[pairs[0][1].dtype]

    def refresh(self) -> None:
        _refresh[(len(self._tensors),)](
            self._places, self._factors, self._tensors, self._pieces, OUT=self._type, SIZE=self._size, num_warps=4
        )
