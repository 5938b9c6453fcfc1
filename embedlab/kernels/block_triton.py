"""Triton kernels between the matrix products of a transformer block, for `embedlab.kernels.fused_block`.

What a compiler makes of the same lines reads a gradient once for each sum over it and draws four random numbers where
one is used. Here a backward kernel makes the sums for the gradients of biases and norms as it goes: each program adds
up its own rows and writes one partial row, and `column_sums` adds those up in an order that repeats.

A row of D values is in four parts of equal width (a power of two), so that one call of Philox, which gives four
numbers, serves four columns.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_ROUNDS = tl.constexpr(7)
"""Of Philox-4x32: the fewest that pass all tests of BigCrush (Salmon et al. 2011, table 2)."""
_DENSITY = tl.constexpr(0.3989422804014327)  # of the standard normal distribution at 0


@triton.jit
def _kept(SEED, rows, cols, dropout, PART: tl.constexpr):
    """For each part, 1 / (1 - p) where an element is kept, else 0."""
    counter = rows[:, None] * PART + cols[None, :]
    a, b, c, d = tl.rand4x(tl.load(SEED), counter, _ROUNDS)
    scale = 1.0 / (1.0 - dropout)
    return (
        tl.where(a >= dropout, scale, 0.0),
        tl.where(b >= dropout, scale, 0.0),
        tl.where(c >= dropout, scale, 0.0),
        tl.where(d >= dropout, scale, 0.0),
    )


@triton.jit
def _four(base, start, inside, cols, width, PART: tl.constexpr):
    """The four parts of rows that begin at `start` [R, 1], fp32; 0 outside."""
    at = start + cols[None, :]
    column = cols[None, :]
    return (
        tl.load(base + at, mask=inside & (column < width), other=0.0).to(tl.float32),
        tl.load(base + at + PART, mask=inside & (column + PART < width), other=0.0).to(tl.float32),
        tl.load(base + at + 2 * PART, mask=inside & (column + 2 * PART < width), other=0.0).to(tl.float32),
        tl.load(base + at + 3 * PART, mask=inside & (column + 3 * PART < width), other=0.0).to(tl.float32),
    )


@triton.jit
def _store(base, start, inside, cols, width, a, b, c, d, PART: tl.constexpr):
    at = start + cols[None, :]
    column = cols[None, :]
    kind = base.dtype.element_ty
    tl.store(base + at, a.to(kind), mask=inside & (column < width))
    tl.store(base + at + PART, b.to(kind), mask=inside & (column + PART < width))
    tl.store(base + at + 2 * PART, c.to(kind), mask=inside & (column + 2 * PART < width))
    tl.store(base + at + 3 * PART, d.to(kind), mask=inside & (column + 3 * PART < width))


@triton.jit
def _columns(base, cols, width, PART: tl.constexpr):
    """The four parts of one row of weights, [1, PART] each."""
    return _four(base, tl.zeros([1, 1], tl.int32), cols[None, :] >= 0, cols, width, PART)


@triton.jit
def _rounded(z, kind: tl.constexpr):
    return z.to(kind).to(tl.float32)


@triton.jit
def _normalise_and_store(
    z0, z1, z2, z3, GAMMA, BETA, SEED, Z, Y, STATS, rows, cols, count, width, dropout, eps,
    PART: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """Layer norm of sums ``z`` (rounded to the type of Z first), with dropout after it where `DROPS`."""
    inside = rows[:, None] < count
    start = rows[:, None].to(tl.int64) * width
    column = cols[None, :]
    kind = Z.dtype.element_ty
    z0, z1, z2, z3 = _rounded(z0, kind), _rounded(z1, kind), _rounded(z2, kind), _rounded(z3, kind)
    _store(Z, start, inside, cols, width, z0, z1, z2, z3, PART)
    mean = tl.sum(z0 + z1 + z2 + z3, 1) / width  # one reduction over threads, not four
    z0 = tl.where(column < width, z0 - mean[:, None], 0.0)
    z1 = tl.where(column + PART < width, z1 - mean[:, None], 0.0)
    z2 = tl.where(column + 2 * PART < width, z2 - mean[:, None], 0.0)
    z3 = tl.where(column + 3 * PART < width, z3 - mean[:, None], 0.0)
    variance = tl.sum(z0 * z0 + z1 * z1 + z2 * z2 + z3 * z3, 1) / width
    root = 1.0 / tl.sqrt(variance + eps)
    tl.store(STATS + rows, mean, mask=rows < count)
    tl.store(STATS + count + rows, root, mask=rows < count)
    g0, g1, g2, g3 = _columns(GAMMA, cols, width, PART)
    b0, b1, b2, b3 = _columns(BETA, cols, width, PART)
    y0 = z0 * root[:, None] * g0 + b0
    y1 = z1 * root[:, None] * g1 + b1
    y2 = z2 * root[:, None] * g2 + b2
    y3 = z3 * root[:, None] * g3 + b3
    if DROPS:
        k0, k1, k2, k3 = _kept(SEED, rows, cols, dropout, PART)
        y0, y1, y2, y3 = y0 * k0, y1 * k1, y2 * k2, y3 * k3
    _store(Y, start, inside, cols, width, y0, y1, y2, y3, PART)


@triton.jit
def _add_norm_forward(
    X, R, GAMMA, BETA, SEED, Z, Y, STATS, count, width, dropout, eps,
    ROWS: tl.constexpr, PART: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, PART)
    inside = rows[:, None] < count
    start = rows[:, None].to(tl.int64) * width
    x0, x1, x2, x3 = _four(X, start, inside, cols, width, PART)
    if DROPS:
        k0, k1, k2, k3 = _kept(SEED, rows, cols, dropout, PART)
        x0, x1, x2, x3 = x0 * k0, x1 * k1, x2 * k2, x3 * k3
    r0, r1, r2, r3 = _four(R, start, inside, cols, width, PART)
    _normalise_and_store(
        x0 + r0, x1 + r1, x2 + r2, x3 + r3, GAMMA, BETA, SEED, Z, Y, STATS, rows, cols, count, width, 0.0, eps,
        PART, False,
    )  # fmt: skip


@triton.jit
def _embed_forward(
    IDS, POSITIONS, WORDS, PLACES, KIND, GAMMA, BETA, SEED, Z, Y, STATS, count, width, dropout, eps,
    ROWS: tl.constexpr, PART: tl.constexpr, DROPS: tl.constexpr, TYPED: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, PART)
    inside = rows[:, None] < count
    word = tl.load(IDS + rows, mask=rows < count, other=0).to(tl.int64)
    place = tl.load(POSITIONS + rows, mask=rows < count, other=0).to(tl.int64)
    z0, z1, z2, z3 = _four(WORDS, word[:, None] * width, inside, cols, width, PART)
    p0, p1, p2, p3 = _four(PLACES, place[:, None] * width, inside, cols, width, PART)
    z0, z1, z2, z3 = z0 + p0, z1 + p1, z2 + p2, z3 + p3
    if TYPED:
        t0, t1, t2, t3 = _columns(KIND, cols, width, PART)
        z0, z1, z2, z3 = z0 + t0, z1 + t1, z2 + t2, z3 + t3
    _normalise_and_store(
        z0, z1, z2, z3, GAMMA, BETA, SEED, Z, Y, STATS, rows, cols, count, width, dropout, eps, PART, DROPS
    )


@triton.jit
def _norm_backward(
    DY, Z, STATS, GAMMA, SEED, DZ, DX, SUMS, count, width, dropout,
    ROWS: tl.constexpr, PART: tl.constexpr, DROPS: tl.constexpr, AFTER: tl.constexpr,
):  # fmt: skip
    """Gradients through a norm, and partial sums: for its weight, its bias, and over the gradient of its input.

    DZ is the gradient of the sum that is normalised. Dropout stands before that sum, so that DX is the gradient
    of what was dropped out, and the third sum is over it; or after the norm (`AFTER`), and the third sum is over DZ.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    cols = tl.arange(0, PART)
    column = cols[None, :]
    empty = tl.zeros([ROWS, PART], tl.float32)
    g0, g1, g2, g3 = empty, empty, empty, empty
    b0, b1, b2, b3 = empty, empty, empty, empty
    x0, x1, x2, x3 = empty, empty, empty, empty
    first = program * ROWS
    while first < count:
        rows = first + tl.arange(0, ROWS)
        inside = rows[:, None] < count
        start = rows[:, None].to(tl.int64) * width
        d0, d1, d2, d3 = _four(DY, start, inside, cols, width, PART)
        z0, z1, z2, z3 = _four(Z, start, inside, cols, width, PART)
        mean = tl.load(STATS + rows, mask=rows < count, other=0.0)[:, None]
        root = tl.load(STATS + count + rows, mask=rows < count, other=0.0)[:, None]
        if DROPS and AFTER:
            k0, k1, k2, k3 = _kept(SEED, rows, cols, dropout, PART)
            d0, d1, d2, d3 = d0 * k0, d1 * k1, d2 * k2, d3 * k3
        z0 = tl.where(column < width, (z0 - mean) * root, 0.0)
        z1 = tl.where(column + PART < width, (z1 - mean) * root, 0.0)
        z2 = tl.where(column + 2 * PART < width, (z2 - mean) * root, 0.0)
        z3 = tl.where(column + 3 * PART < width, (z3 - mean) * root, 0.0)
        g0, g1, g2, g3 = g0 + d0 * z0, g1 + d1 * z1, g2 + d2 * z2, g3 + d3 * z3
        b0, b1, b2, b3 = b0 + d0, b1 + d1, b2 + d2, b3 + d3
        w0, w1, w2, w3 = _columns(GAMMA, cols, width, PART)  # loaded again: registers are what is short
        d0, d1, d2, d3 = d0 * w0, d1 * w1, d2 * w2, d3 * w3
        plain = tl.sum(d0 + d1 + d2 + d3, 1) / width
        along = tl.sum(d0 * z0 + d1 * z1 + d2 * z2 + d3 * z3, 1) / width
        d0 = tl.where(column < width, root * (d0 - plain[:, None] - z0 * along[:, None]), 0.0)
        d1 = tl.where(column + PART < width, root * (d1 - plain[:, None] - z1 * along[:, None]), 0.0)
        d2 = tl.where(column + 2 * PART < width, root * (d2 - plain[:, None] - z2 * along[:, None]), 0.0)
        d3 = tl.where(column + 3 * PART < width, root * (d3 - plain[:, None] - z3 * along[:, None]), 0.0)
        _store(DZ, start, inside, cols, width, d0, d1, d2, d3, PART)
        if DROPS and not AFTER:
            k0, k1, k2, k3 = _kept(SEED, rows, cols, dropout, PART)
            d0, d1, d2, d3 = d0 * k0, d1 * k1, d2 * k2, d3 * k3
            _store(DX, start, inside, cols, width, d0, d1, d2, d3, PART)
        x0, x1, x2, x3 = x0 + d0, x1 + d1, x2 + d2, x3 + d3
        first += programs * ROWS
    row = tl.zeros([1, 1], tl.int64) + program.to(tl.int64) * 3 * width
    everywhere = column >= 0
    _store(SUMS, row, everywhere, cols, width,
           tl.sum(g0, 0)[None], tl.sum(g1, 0)[None], tl.sum(g2, 0)[None], tl.sum(g3, 0)[None], PART)  # fmt: skip
    _store(SUMS, row + width, everywhere, cols, width,
           tl.sum(b0, 0)[None], tl.sum(b1, 0)[None], tl.sum(b2, 0)[None], tl.sum(b3, 0)[None], PART)  # fmt: skip
    _store(SUMS, row + 2 * width, everywhere, cols, width,
           tl.sum(x0, 0)[None], tl.sum(x1, 0)[None], tl.sum(x2, 0)[None], tl.sum(x3, 0)[None], PART)  # fmt: skip


@triton.jit
def _normal(u):
    """Distribution function and density of the standard normal distribution.

    Abramowitz and Stegun 26.2.17: the function errs by less than 7.5e-8, a thousandth of bf16's rounding where it is
    not tiny, at half the cost of the library's erf, which is what a GELU takes its time for.
    """
    density = _DENSITY * tl.exp(-0.5 * u * u)
    t = 1.0 / (1.0 + 0.2316419 * tl.abs(u))
    series = t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    tail = density * series
    return tl.where(u < 0, tail, 1.0 - tail), density


@triton.jit
def _gelu_forward(U, OUT, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    u = tl.load(U + at, mask=at < size, other=0.0).to(tl.float32)
    below, _ = _normal(u)
    tl.store(OUT + at, (u * below).to(OUT.dtype.element_ty), mask=at < size)


@triton.jit
def _gelu_backward(DOUT, U, DU, SUMS, count, width, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Gradient through the GELU, and its partial sums over rows (of the bias that was added before)."""
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    group = tl.program_id(1)
    groups = tl.num_programs(1)
    total = tl.zeros([ROWS, COLS], tl.float32)
    first = group * ROWS
    while first < count:
        rows = first + tl.arange(0, ROWS)
        at = rows[:, None].to(tl.int64) * width + cols[None, :]
        inside = (rows[:, None] < count) & (cols[None, :] < width)
        u = tl.load(U + at, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(DOUT + at, mask=inside, other=0.0).to(tl.float32)
        below, density = _normal(u)
        d = d * (below + u * density)
        tl.store(DU + at, d.to(DU.dtype.element_ty), mask=inside)
        total += d
        first += groups * ROWS
    tl.store(SUMS + group.to(tl.int64) * width + cols, tl.sum(total, 0), mask=cols < width)


@triton.jit
def _column_sums(
    SUMS, OUT, o0, o1, o2, o3, w0, w1, w2, w3, n0, n1, n2, n3, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """One section's columns, added up over its rows."""
    section = tl.program_id(1)
    offset = tl.where(section == 0, o0, tl.where(section == 1, o1, tl.where(section == 2, o2, o3)))
    width = tl.where(section == 0, w0, tl.where(section == 1, w1, tl.where(section == 2, w2, w3)))
    count = tl.where(section == 0, n0, tl.where(section == 1, n1, tl.where(section == 2, n2, n3)))
    into = tl.where(
        section == 0, 0, tl.where(section == 1, w0, tl.where(section == 2, w0 + w1, w0 + w1 + w2))
    )
    if tl.program_id(0) * COLS < width:
        cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
        total = tl.zeros([ROWS, COLS], tl.float32)
        first = 0
        while first < count:
            rows = first + tl.arange(0, ROWS)
            at = offset.to(tl.int64) + rows[:, None].to(tl.int64) * width + cols[None, :]
            total += tl.load(SUMS + at, mask=(rows[:, None] < count) & (cols[None, :] < width), other=0.0)
            first += ROWS
        out = tl.sum(total, 0).to(OUT.dtype.element_ty)
        tl.store(OUT + into + cols, out, mask=cols < width)


_ROWS, _WARPS = 4, 4
_BACK_ROWS, _BACK_WARPS = 1, 4
_PROGRAMS = 528  # four for each of an H100's 132 multiprocessors
_GELU_ROWS, _GELU_COLS, _GELU_WARPS = 4, 256, 8


def _part(width: int) -> int:
    return max(16, triton.next_power_of_2(-(-width // 4)))


def norm_programs(count: int) -> int:
    """Partial rows of `launch_norm_backward`: as few programs as take the same number of turns."""
    blocks = -(-count // _BACK_ROWS)
    return -(-blocks // -(-blocks // _PROGRAMS))


def gelu_groups(count: int, width: int) -> int:
    """Partial rows of `launch_gelu_backward`."""
    blocks = -(-count // _GELU_ROWS)
    most = max(1, 2 * _PROGRAMS // -(-width // _GELU_COLS))
    return -(-blocks // -(-blocks // most))


def launch_add_norm(
    x: Tensor, residual: Tensor, gamma: Tensor, beta: Tensor, seed: Tensor, z: Tensor, y: Tensor, stats: Tensor,
    dropout: float, eps: float,
) -> None:  # fmt: skip
    """Fill `z`, `y` [C, D] and `stats` [2, C]."""
    count, width = x.shape
    _add_norm_forward[(-(-count // _ROWS),)](
        x, residual, gamma, beta, seed, z, y, stats, count, width, dropout, eps,
        ROWS=_ROWS, PART=_part(width), DROPS=dropout > 0, num_warps=_WARPS,
    )  # fmt: skip


def launch_embed(
    ids: Tensor, positions: Tensor, words: Tensor, places: Tensor, kind: Tensor | None, gamma: Tensor,
    beta: Tensor, seed: Tensor, z: Tensor, y: Tensor, stats: Tensor, dropout: float, eps: float,
) -> None:  # fmt: skip
    """Fill `z`, `y` [C, D] and `stats` [2, C]."""
    count, width = z.shape
    _embed_forward[(-(-count // _ROWS),)](
        ids, positions, words, places, words if kind is None else kind, gamma, beta, seed, z, y, stats,
        count, width, dropout, eps,
        ROWS=_ROWS, PART=_part(width), DROPS=dropout > 0, TYPED=kind is not None, num_warps=_WARPS,
    )  # fmt: skip


def launch_norm_backward(
    grad: Tensor, z: Tensor, stats: Tensor, gamma: Tensor, seed: Tensor, dz: Tensor, dx: Tensor, sums: Tensor,
    dropout: float, after: bool,
) -> None:  # fmt: skip
    """Fill `dz` and `dx` (which may be one) [C, D], and `sums` [`norm_programs`, 3 D]."""
    count, width = z.shape
    _norm_backward[(norm_programs(count),)](
        grad, z, stats, gamma, seed, dz, dx, sums, count, width, dropout,
        ROWS=_BACK_ROWS, PART=_part(width), DROPS=dropout > 0, AFTER=after, num_warps=_BACK_WARPS,
    )  # fmt: skip


def launch_gelu(u: Tensor, out: Tensor) -> None:
    """Fill `out`, of the shape of `u`."""
    size, block = u.numel(), 2048
    _gelu_forward[(-(-size // block),)](u, out, size, BLOCK=block, num_warps=8)


def launch_gelu_backward(grad: Tensor, u: Tensor, du: Tensor, sums: Tensor) -> None:
    """Fill `du` [C, F] (it may be `grad`), and `sums` [`gelu_groups`, F]."""
    count, width = u.shape
    _gelu_backward[(-(-width // _GELU_COLS), gelu_groups(count, width))](
        grad, u, du, sums, count, width, ROWS=_GELU_ROWS, COLS=_GELU_COLS, num_warps=_GELU_WARPS
    )


def launch_column_sums(sums: Tensor, sections: list[tuple[int, int]], out: Tensor) -> None:
    """Add up each section's rows into `out`, the sections' columns one after another.

    Args:
        sums: fp32, flat: the sections one after another.
        sections: (rows, columns) of at most four.
        out: flat, of all columns.
    """
    rows = [r for r, _ in sections] + [0] * (4 - len(sections))
    widths = [w for _, w in sections] + [0] * (4 - len(sections))
    offsets = [sum(r * w for r, w in sections[:i]) for i in range(4)]
    cols = 32
    _column_sums[(-(-max(widths) // cols), len(sections))](
        sums, out, *offsets, *widths, *rows, ROWS=128, COLS=cols, num_warps=4
    )
