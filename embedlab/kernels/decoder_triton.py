"""Triton kernels between the matrix products of a decoder's block with LoRA, for `embedlab.kernels.fused_decoder`.

A norm, or SwiGLU, and the masked down-products of all updates that read its result are one kernel. Masks are drawn and
kept as in `embedlab.kernels.lora_triton`. Widths are multiples of 64; there are at most three updates of one input.
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
TALL = 16
"""Tokens of a program here: at 9,400 tokens all programs are on the card's 132 multiprocessors at once."""


@triton.jit
def kept(x, BITS, update, tokens, width: tl.constexpr, rows, first, DROPPED: tl.constexpr):
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
    some = kept(x, BITS, update, tokens, width, rows, first, DROPPED)
    return total + tl.dot(some, tl.trans(a), input_precision="ieee")


@triton.jit
def _store_h(
    total, OUT, rows, tokens, stride, width: tl.constexpr, update, DROPPED: tl.constexpr, RANK: tl.constexpr
):
    place = (
        OUT
        + tl.arange(0, total.shape[0])[:, None] * stride
        + width
        + update * RANK
        + tl.arange(0, RANK)[None, :]
    )
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
    # Of 64 bits once a program: tensors of such addresses take twice the registers.
    skipped = top.to(tl.int64)
    X, MORE, SUM, OUT = (
        X + skipped * width,
        MORE + skipped * width,
        SUM + skipped * width,
        OUT + skipped * stride,
    )
    at = tl.arange(0, TALL)[:, None]
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
    skipped = top.to(tl.int64)
    GATES, OUT = GATES + skipped * (2 * width), OUT + skipped * stride
    at = tl.arange(0, TALL)[:, None]
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
    return total + kept(part, BITS, update, tokens, width, rows, first, DROPPED)


@triton.jit
def _norm_backward(
    ABOVE, A, BITS, X, ROOTS, GAMMA, GRAD, OUT, HALF, tokens, stride, width: tl.constexpr, UPDATES: tl.constexpr,
    DROPPED: tl.constexpr, RANK: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """The gradient of the residual stream: what comes by the norm, and (`ADDS`) what passes it by.

    ABOVE has the norm's gradient by way of the frozen weights and those of the updates' h. The result goes to OUT, and
    to HALF in the type of products.
    """
    top = tl.program_id(0) * TALL
    rows, cols, ranks = top + tl.arange(0, TALL), tl.arange(0, WIDE), tl.arange(0, RANK)
    skipped = top.to(tl.int64)
    ABOVE, X, GRAD = ABOVE + skipped * stride, X + skipped * width, GRAD + skipped * width
    OUT, HALF = OUT + skipped * width, HALF + skipped * width
    at = tl.arange(0, TALL)[:, None]
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


def _empty_bits(tokens: int, updates: Updates) -> Tensor:
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
        joined, bits = updates.down.new_empty(tokens, width + n * rank), _empty_bits(tokens, updates)
        down, dropped, seed = updates
    _norm_down[(triton.cdiv(tokens, TALL),)](
        x, x if more is None else more, gamma, down, seed, total, joined, bits, roots, tokens, eps, joined.stride(0),
        width, UPDATES=n, DROPPED=dropped, RANK=rank, TALL=TALL, WIDE=WIDE, ADDS=more is not None,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return Normed(total, joined, bits, roots)


def down(joined: Tensor, updates: Updates, gates: Tensor | None = None) -> Tensor:
    """Fill the last columns of ``joined`` [T, D + R] with h of the first, or of SwiGLU of ``gates`` [T, 2 D], which the
    first ones get; gives the mask."""
    _, rank, width = updates.sizes
    tokens, bits = len(joined), _empty_bits(len(joined), updates)
    wide = 2 * WIDE if width % (2 * WIDE) == 0 else WIDE
    _down[(triton.cdiv(tokens, TALL),)](
        joined if gates is None else gates, updates.down, updates.seed, joined, bits, tokens, joined.stride(0), width,
        DROPPED=updates.dropped, RANK=rank, TALL=TALL, WIDE=wide, GATED=gates is not None, num_warps=4, num_stages=3,
    )  # fmt: skip
    return bits


def norm_backward(
    above: Tensor,
    normed: Normed,
    gamma: Tensor,
    updates: Updates | None,
    grad: Tensor | None,
    dtype: torch.dtype,
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
    out, half = torch.empty_like(normed.x), torch.empty_like(normed.x, dtype=dtype)
    _norm_backward[(triton.cdiv(tokens, TALL),)](
        above, above if updates is None else updates.down, normed.bits, normed.x, normed.roots, gamma,
        out if grad is None else grad, out, half, tokens, above.stride(0), width, UPDATES=n,
        DROPPED=0 if updates is None else updates.dropped, RANK=rank, TALL=TALL, WIDE=WIDE, ADDS=grad is not None,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return out, half


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
            self._places,
            self._factors,
            self._tensors,
            self._pieces,
            OUT=self._type,
            SIZE=self._size,
            num_warps=4,
        )
