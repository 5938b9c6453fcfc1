"""Attention for short sequences: one program holds a whole head of a whole sequence.

Flash kernels work in tiles of 64 to 128 queries. Sentences of 32 tokens leave most of a tile empty, and attention
then takes as long as the feed-forward products. Here scores, dropout and soft-max of one head never leave the chip,
and the backward pass computes them again.

Products of fp32 are fp32 ones ("ieee"; Triton would take TF32), as precision=32-true says. Those of bf16 are what they
are anyway.

Dropout draws from a seed that is a tensor, made by the device's generator: inside a CUDA graph each replay has
another one.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from embedlab.kernels.attention import differentiate, heads_first

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
def _forward(
    Q, K, V, MASK, SEED, OUT, heads, length, scale, dropout,
    qb, qh, ql, kb, kh, kl, vb, vh, vl, ob, oh, ol, mb, mi, mj,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    b, h = (program // heads).to(tl.int64), (program % heads).to(tl.int64)
    rows, cols = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    q = _tile(Q, b * qb + h * qh, ql, rows, cols, length, WIDTH)
    k = _tile(K, b * kb + h * kh, kl, rows, cols, length, WIDTH)
    v = _tile(V, b * vb + h * vh, vl, rows, cols, length, WIDTH)
    inside = (rows[:, None] < length) & (rows[None, :] < length)
    allowed = tl.load(MASK + b * mb + rows[:, None] * mi + rows[None, :] * mj, mask=inside, other=0) != 0
    out = _context(q, k, v, allowed, SEED, program, rows, scale, dropout, BLOCK, DROPS)
    tl.store(
        OUT + b * ob + h * oh + rows[:, None] * ol + cols[None, :],
        out.to(v.dtype),
        mask=rows[:, None] < length,
    )


@triton.jit
def _backward(
    Q, K, V, MASK, SEED, DO, DQ, DK, DV, heads, length, scale, dropout,
    qb, qh, ql, kb, kh, kl, vb, vh, vl, ob, oh, ol, gb, gh, gl, mb, mi, mj,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    b, h = (program // heads).to(tl.int64), (program % heads).to(tl.int64)
    rows, cols = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    q = _tile(Q, b * qb + h * qh, ql, rows, cols, length, WIDTH)
    k = _tile(K, b * kb + h * kh, kl, rows, cols, length, WIDTH)
    v = _tile(V, b * vb + h * vh, vl, rows, cols, length, WIDTH)
    do = _tile(DO, b * ob + h * oh, ol, rows, cols, length, WIDTH)
    inside = (rows[:, None] < length) & (rows[None, :] < length)
    allowed = tl.load(MASK + b * mb + rows[:, None] * mi + rows[None, :] * mj, mask=inside, other=0) != 0
    dq, dk, dv = _gradients(q, k, v, do, allowed, SEED, program, rows, scale, dropout, BLOCK, DROPS)
    at = b * gb + h * gh + rows[:, None] * gl + cols[None, :]
    real = rows[:, None] < length
    tl.store(DQ + at, dq.to(q.dtype), mask=real)
    tl.store(DK + at, dk.to(q.dtype), mask=real)
    tl.store(DV + at, dv.to(q.dtype), mask=real)


def _block(length: int) -> int:
    return max(16, triton.next_power_of_2(length))


def _warps(block: int) -> int:
    return {16: 1, 32: 1, 64: 4, 128: 8}[block]


@torch.library.custom_op("embedlab::short_attention", mutates_args=())
def short_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, seed: Tensor, scale: float, dropout: float
) -> Tensor:
    """Soft-max attention with dropout on the weights.

    Args:
        query, key, value: ``[B, H, L, D]``, the last dimension contiguous, D a power of two, L at most 128.
        mask: bool ``[B, L, L]`` (broadcast strides are fine), True where a query may see a key. A query that sees
            none gives 0.
        seed: int64 ``[1]`` on the device.
        scale: of the scores.
        dropout: share of weights dropped.

    Returns:
        ``[B, H, L, D]`` in the memory order ``[B, L, H, D]``.
    """
    b, h, length, d = query.shape
    out, block = heads_first(query), _block(length)
    _forward[(b * h,)](
        query, key, value, mask, seed, out, h, length, scale, dropout,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *out.stride()[:3], *mask.stride(),
        BLOCK=block, WIDTH=d, DROPS=dropout > 0, num_warps=_warps(block),
    )  # fmt: skip
    return out


@torch.library.custom_op("embedlab::short_attention_backward", mutates_args=())
def short_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    seed: Tensor,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `short_attention` with respect to query, key and value."""
    b, h, length, d = query.shape
    grads, block = tuple(heads_first(query) for _ in range(3)), _block(length)
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    _backward[(b * h,)](
        query, key, value, mask, seed, grad, *grads, h, length, scale, dropout,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *grad.stride()[:3], *grads[0].stride()[:3],
        *mask.stride(), BLOCK=block, WIDTH=d, DROPS=dropout > 0, num_warps=_warps(block),
    )  # fmt: skip
    return grads[0], grads[1], grads[2]


@short_attention.register_fake
def _(query: Tensor, *rest: Any) -> Tensor:
    return heads_first(query)


@short_attention_backward.register_fake
def _(grad: Tensor, query: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return heads_first(query), heads_first(query), heads_first(query)


differentiate(short_attention, short_attention_backward)


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls for ``attn_implementation="embedlab_short"``: ``[B, L, H, D]`` and no weights."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    b, _, length, _ = query.shape
    if attention_mask is None:
        mask = torch.ones((), dtype=torch.bool, device=query.device).expand(b, length, length)
    else:
        mask = attention_mask if attention_mask.dtype == torch.bool else attention_mask >= 0
        mask = mask[:, 0].expand(b, length, length)
    seed = torch.randint(2**31 - 1, (1,), device=query.device)
    out = short_attention(query, key, value, mask, seed, float(scale), float(dropout))
    return out.transpose(1, 2), None
