"""Triton kernels for the gradients of a block's matrices A and B, for `fused_decoder`.

SwiGLU's gradient and those of the matrices beside it are one kernel, those of all other matrices another. They are sums
over tokens: each program writes its share, and a last kernel adds the shares in a fixed order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from embedlab.kernels.decoder.decoder_triton import WIDE, Updates, kept, sigmoid

PARTS = 16
"""Shares of the tokens that programs sum for themselves, a power of two."""


@triton.jit
def _swiglu_backward(
    ABOVE, GATES, FED, H, A, BITS, OUT, SHARES, tokens, stride, h_stride, total, of_a, of_b,
    width: tl.constexpr, DROPPED: tl.constexpr, RANK: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
    TURNS: tl.constexpr,
):  # fmt: skip
    """Gradients of gates and values in some columns, and shares of those of the matrices on both sides.

    ABOVE [T, width + R]: of SwiGLU by the frozen weights, and of h. FED, of the same shape: SwiGLU and that h.
    H: the h of gates and of values. The shares go to `of_a` (A of the layer that reads SwiGLU) and `of_b` (B of gates,
    then of values) in a row of SHARES.
    """
    part, first = tl.program_id(1), tl.program_id(0) * WIDE
    cols, ranks = first + tl.arange(0, WIDE), tl.arange(0, RANK)
    scale = 65536 / (65536 - DROPPED)
    a = tl.load(A + ranks[:, None] * width + cols[None, :])
    at = tl.arange(0, TALL)[:, None]
    sum_a = tl.zeros([RANK, WIDE], tl.float32)
    sum_g = tl.zeros([WIDE, RANK], tl.float32)
    sum_u = tl.zeros([WIDE, RANK], tl.float32)
    for turn in range(TURNS):
        top = (part * TURNS + turn) * TALL
        rows, skipped = top + tl.arange(0, TALL), top.to(tl.int64)
        real = rows[:, None] < tokens
        above = ABOVE + skipped * stride
        h = tl.load(above + at * stride + width + ranks[None, :], mask=real, other=0.0)
        d = tl.load(above + at * stride + cols[None, :], mask=real, other=0.0).to(tl.float32)
        up = tl.dot(h, a, input_precision="ieee")
        d += kept(up, BITS, 0, tokens, width, rows, first, DROPPED) * scale
        gates, out = GATES + skipped * (2 * width), OUT + skipped * (2 * width)
        gate_at = at * (2 * width) + cols[None, :]
        g = tl.load(gates + gate_at, mask=real, other=0.0).to(tl.float32)
        u = tl.load(gates + gate_at + width, mask=real, other=0.0).to(tl.float32)
        s = sigmoid(g)
        dg = (d * u * s * (1.0 + g * (1.0 - s))).to(OUT.dtype.element_ty)
        du = (d * g * s).to(OUT.dtype.element_ty)
        tl.store(out + gate_at, dg, mask=real)
        tl.store(out + gate_at + width, du, mask=real)
        # Read, not computed again: Triton would do all of that twice, in each layout that a product needs.
        x = tl.load(FED + skipped * stride + at * stride + cols[None, :], mask=real, other=0.0)
        some = kept(x, BITS, 0, tokens, width, rows, first, DROPPED)
        sum_a += tl.dot(tl.trans(h), some, input_precision="ieee")
        beside = H + skipped * h_stride + at * h_stride + ranks[None, :]
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
    at = tl.arange(0, TALL)[:, None]
    t0 = tl.zeros([RANK, WIDE], tl.float32)
    t1, t2 = t0, t0
    for turn in range(TURNS):
        top = (part * TURNS + turn) * TALL
        rows, skipped = top + tl.arange(0, TALL), top.to(tl.int64)
        real = rows[:, None] < tokens
        x = tl.load(X + skipped * x_stride + at * x_stride + cols[None, :], mask=real, other=0.0)
        beside = DH + skipped * h_stride + at * h_stride + ranks[None, :]
        h = tl.load(beside, mask=real, other=0.0)
        some = kept(x, BITS, 0, tokens, width, rows, first, DROPPED)
        t0 += tl.dot(tl.trans(h), some, input_precision="ieee")
        if UPDATES > 1:
            h = tl.load(beside + RANK, mask=real, other=0.0)
            some = kept(x, BITS, 1, tokens, width, rows, first, DROPPED)
            t1 += tl.dot(tl.trans(h), some, input_precision="ieee")
        if UPDATES > 2:
            h = tl.load(beside + 2 * RANK, mask=real, other=0.0)
            some = kept(x, BITS, 2, tokens, width, rows, first, DROPPED)
            t2 += tl.dot(tl.trans(h), some, input_precision="ieee")
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
    at = tl.arange(0, TALL)[:, None]
    total = tl.zeros([WIDE, RANK], tl.float32)
    for turn in range(TURNS):
        top = (part * TURNS + turn) * TALL
        rows, skipped = top + tl.arange(0, TALL), top.to(tl.int64)
        real = rows[:, None] < tokens
        dy = tl.load(DY + skipped * y_stride + at * y_stride + cols[None, :], mask=real, other=0.0)
        h = tl.load(
            H + skipped * h_stride + at * h_stride + update * RANK + ranks[None, :], mask=real, other=0.0
        )
        total += tl.dot(tl.trans(dy), h, input_precision="ieee")
    tl.store(ROW + cols[:, None] * RANK + ranks[None, :], total)


@triton.jit
def _matrices(
    X, CONTEXT, Y, DH_X, DH_C, DH_Y, BITS_X, BITS_C, BITS_Y, DQKV, DO, DD, H_X, H_C, H_D, SHARES, tokens, few,
    x_stride, c_stride, y_stride, dx_stride, dc_stride, dy_stride, d_stride, total,
    of_x, of_c, of_y, of_bx, of_bc, of_bd, QUERY: tl.constexpr, KEY: tl.constexpr, width: tl.constexpr,
    DROPPED: tl.constexpr, RANK: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Shares of the gradients of a block's matrices, but for those of `_swiglu_backward`.

    X, CONTEXT, Y: inputs of query, key and value; of the output layer; of gate and up. DH: gradients of their h. DQKV,
    DO, DD: of the outputs of these layers and of the last one, whose inputs' h are H. QUERY, KEY: widths. From
    CONTEXT on there are `few` tokens.
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
        _of_down(CONTEXT, c_stride, DH_C, dc_stride, BITS_C, row + of_c, block - x, part, few, QUERY, 1,
                 DROPPED, RANK, TALL, WIDE, TURNS)  # fmt: skip
    elif block < y:
        _of_down(Y, y_stride, DH_Y, dy_stride, BITS_Y, row + of_y, block - c, part, few, width, 2,
                 DROPPED, RANK, TALL, WIDE, TURNS)  # fmt: skip
    elif block < q:
        first = (block - y) * WIDE
        update = (first >= QUERY).to(tl.int32) + (first >= QUERY + KEY).to(tl.int32)
        _of_up(DQKV, QUERY + 2 * KEY, H_X, x_stride, row + of_bx, block - y, update, part, tokens,
               RANK, TALL, WIDE, TURNS)  # fmt: skip
    elif block < o:
        _of_up(DO, width, H_C, c_stride, row + of_bc, block - q, 0, part, few, RANK, TALL, WIDE, TURNS)
    else:
        _of_up(DD, width, H_D, d_stride, row + of_bd, block - o, 0, part, few, RANK, TALL, WIDE, TURNS)


@triton.jit
def _total(SHARES, OUT, total, ups, scale, PARTS: tl.constexpr, SIZE: tl.constexpr):
    """Sums of PARTS rows; from column `ups` on, where gradients are of scaled matrices, times `scale`."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    rows = tl.arange(0, PARTS)
    each = tl.load(
        SHARES + rows[:, None].to(tl.int64) * total + at[None, :], mask=at[None, :] < total, other=0.0
    )
    out = tl.sum(each, 0) * tl.where(at >= ups, scale, 1.0)
    tl.store(OUT + at, out, mask=at < total)


class Shares:
    """Gradients of all matrices of a block, and how programs share out the tokens.

    Args:
        sizes: elements of A of query, key and value; of the output layer; of gate and up; of down; and of B of these.
        tokens: T, or more.
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
        total, size = self.at[-1], 512
        out = self.parts.new_empty(total)
        _total[(triton.cdiv(total, size),)](
            self.parts, out, total, self.at[4], scale, PARTS=PARTS, SIZE=size, num_warps=4
        )
        return out


def swiglu_backward(
    above: Tensor, gates: Tensor, fed: Tensor, h: Tensor, updates: Updates, bits: Tensor, shares: Shares
) -> Tensor:
    """Gradient of ``gates`` [T, 2 D], and its shares.

    Args:
        above: ``[T, D + R]``: of SwiGLU by the frozen weights, and of the h of the update that reads it.
        gates: of the forward.
        fed: ``[T, D + R]``, of the forward too: SwiGLU, and that h.
        h: ``[T, 2 R]``, of the updates of gate and up.
        updates, bits: of the layer that reads SwiGLU.
        shares: of the block.
    """
    _, rank, width = updates.sizes
    out, tall = torch.empty_like(gates), 32
    _swiglu_backward[(width // WIDE, PARTS)](
        above, gates, fed, h, updates.down, bits, out, shares.parts, len(gates), above.stride(0), h.stride(0),
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
    few, width = of_o.shape
    reads = first, context, second
    key = (of_qkv.shape[1] - query) // 2
    blocks = (2 * width + query + of_qkv.shape[1] + 2 * width) // WIDE
    at, tall = shares.at, 64
    _matrices[(blocks, PARTS)](
        *(r.joined for r in reads), *(r.of_h for r in reads), *(r.bits for r in reads), of_qkv, of_o, of_d,
        first.joined[:, width:], context.joined[:, query:], fed, shares.parts, len(of_qkv), few,
        *(r.joined.stride(0) for r in reads), *(r.of_h.stride(0) for r in reads), fed.stride(0),
        at[-1], at[0], at[1], at[2], at[4], at[5], at[7], QUERY=query, KEY=key, width=width, DROPPED=dropped, RANK=rank,
        TALL=tall, WIDE=WIDE, TURNS=shares.turns(tall), num_warps=4, num_stages=2,
    )  # fmt: skip
