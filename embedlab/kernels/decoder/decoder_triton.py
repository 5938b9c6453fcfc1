"""Triton kernels between the matrix products of a decoder's block with LoRA, for `fused_decoder`.

Norms have a program for each token: where they shared one with the masked products behind them, it waited for its own
results. Masks are drawn and kept as in `embedlab.kernels.lora_triton`. Widths are multiples of 64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from embedlab.kernels.lora_triton import draw_masks, launch_of_x, masked

WIDE = 64
"""Columns at once; every width is a multiple."""


@triton.jit
def sigmoid(x):
    """As `tl.sigmoid` but for the last bits: half of its instructions make a division exact."""
    root = tl.rsqrt(1.0 + tl.exp(-x))
    return root * root


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
def _add_norm(
    X, MORE, GAMMA, SUM, OUT, ROOTS, eps, stride, width: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr
):
    """A token's residual stream with what is added to it, and its RMS norm."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    real = cols < width
    x = tl.load(X + token * width + cols, mask=real, other=0.0)
    if ADDS:
        x += tl.load(MORE + token * width + cols, mask=real, other=0.0)
        tl.store(SUM + token * width + cols, x, mask=real)
    root = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    tl.store(ROOTS + token, root)
    n = x * root * tl.load(GAMMA + cols, mask=real, other=0.0)
    tl.store(OUT + token * stride + cols, n.to(OUT.dtype.element_ty), mask=real)


@triton.jit
def _add_norm_backward(
    DN, X, ROOTS, GAMMA, GRAD, OUT, HALF, width: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr
):
    """The gradient of a token's residual stream: what comes by the norm, and (`ADDS`) what passes it by."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    real = cols < width
    at = token * width + cols
    dn = tl.load(DN + at, mask=real, other=0.0).to(tl.float32)
    x = tl.load(X + at, mask=real, other=0.0)
    inner = dn * tl.load(GAMMA + cols, mask=real, other=0.0)
    root = tl.load(ROOTS + token)
    normed = x * root
    out = root * (inner - normed * (tl.sum(inner * normed, 0) / width))
    if ADDS:
        out += tl.load(GRAD + at, mask=real, other=0.0)
    tl.store(OUT + at, out, mask=real)
    tl.store(HALF + at, out.to(HALF.dtype.element_ty), mask=real)


@triton.jit
def _down(
    GATES, A, SEED, OUT, BITS, tokens, stride, width: tl.constexpr, DROPPED: tl.constexpr, RANK: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """The h of one update beside its input, which stands in OUT or (`GATED`) is SwiGLU of gates and values."""
    top, update = tl.program_id(0) * TALL, tl.program_id(1)
    rows, cols = top + tl.arange(0, TALL), tl.arange(0, WIDE)
    # Of 64 bits once a program: tensors of such addresses take twice the registers.
    skipped = top.to(tl.int64)
    GATES, OUT = GATES + skipped * (2 * width), OUT + skipped * stride
    at = tl.arange(0, TALL)[:, None]
    real = rows[:, None] < tokens
    if DROPPED > 0:
        draw_masks(BITS, SEED, update, top, tokens, width, DROPPED, TALL)
        tl.debug_barrier()  # other threads read what one has stored
    total = tl.zeros([TALL, RANK], tl.float32)
    for first in range(0, width, WIDE):
        place = at * stride + first + cols[None, :]
        if GATED:
            gate_at = GATES + at * (2 * width) + first + cols[None, :]
            g = tl.load(gate_at, mask=real, other=0.0).to(tl.float32)
            u = tl.load(gate_at + width, mask=real, other=0.0).to(tl.float32)
            x = (g * sigmoid(g) * u).to(OUT.dtype.element_ty)
            tl.store(OUT + place, x, mask=real)
        else:
            x = tl.load(OUT + place, mask=real, other=0.0)
        total = _add_down(total, x, A, BITS, update, tokens, width, rows, first, DROPPED, RANK, WIDE)
    h = total * (65536 / (65536 - DROPPED))
    place = OUT + at * stride + width + update * RANK + tl.arange(0, RANK)[None, :]
    tl.store(place, h.to(OUT.dtype.element_ty), mask=real)


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


def norm_down(x: Tensor, more: Tensor | None, gamma: Tensor, eps: float, updates: Updates | None) -> Normed:
    """The RMS norm of ``x + more`` [T, D], fp32, and the h of the updates that read it; without updates in fp32."""
    tokens, width = x.shape
    total = x if more is None else torch.empty_like(x)
    roots = x.new_empty(tokens)
    if updates is None:
        joined = torch.empty_like(x)
    else:
        n, rank, _ = updates.sizes
        joined = updates.down.new_empty(tokens, width + n * rank)
    _add_norm[(tokens,)](
        x, x if more is None else more, gamma, total, joined, roots, eps, joined.stride(0), width,
        BLOCK=triton.next_power_of_2(width), ADDS=more is not None, num_warps=_warps(width),
    )  # fmt: skip
    return Normed(total, joined, roots if updates is None else down(joined, updates), roots)


def down(joined: Tensor, updates: Updates, gates: Tensor | None = None) -> Tensor:
    """Fill the last columns of ``joined`` [T, D + n R] with the h of the first, or of SwiGLU of ``gates`` [T, 2 D],
    which the first ones get; gives the masks."""
    n, rank, width = updates.sizes
    tokens = len(joined)
    bits = updates.down.new_empty(n, tokens, width // 32 if updates.dropped else 0, dtype=torch.int32)
    gated = gates is not None
    tall, wide = (16, 2 * WIDE) if gated and width % (2 * WIDE) == 0 else (32, WIDE)
    _down[(triton.cdiv(tokens, tall), n)](
        joined if gates is None else gates, updates.down, updates.seed, joined, bits, tokens, joined.stride(0), width,
        DROPPED=updates.dropped, RANK=rank, TALL=tall, WIDE=wide, GATED=gated, num_warps=4, num_stages=3,
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
    if updates is not None:
        above = launch_of_x(above, normed.bits, updates.down, updates.dropped)
    out, half = torch.empty_like(normed.x), torch.empty_like(normed.x, dtype=dtype)
    _add_norm_backward[(tokens,)](
        above, normed.x, normed.roots, gamma, out if grad is None else grad, out, half, width,
        BLOCK=triton.next_power_of_2(width), ADDS=grad is not None, num_warps=_warps(width),
    )  # fmt: skip
    return out, half


def _warps(width: int) -> int:
    """Of a program that has one token."""
    return min(8, max(2, triton.next_power_of_2(width) // 512))


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
