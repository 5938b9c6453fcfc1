"""S2Sent with mean pooling at inference on CUDA: one pass over each block, and one kernel for the mix.

The operations one by one read every hidden state several times and start some forty kernels, which takes 6 % of a
BERT-base forward at 64 x 32 tokens; here it is below 1 %. Training takes the operations one by one, as does
everything that these two kernels do not cover.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_NORMS = {"mean": 0, "ortho": 1, "sum": 2}
_TOKENS, _FEATURES, _MIXED = 32, 64, 256


@triton.jit
def _squeeze(
    H, MASK, FREQUENCY, GAMMA, F, MEAN, length, width, h_row, h_token, m_row,
    FIRST: tl.constexpr, NORM: tl.constexpr, TOKENS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """One block's share of f, added to that of the blocks before, and its mean over the real tokens."""
    row = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    exists = feature < width
    token = tl.arange(0, TOKENS)
    count = 0
    for start in range(0, length, TOKENS):
        count += tl.sum(_mask(MASK + row * m_row, start + token, length), 0)
    size = tl.maximum(count, 1).to(tl.float32)
    frequency = tl.load(FREQUENCY + feature, mask=exists, other=0).to(tl.float32)
    mean = tl.zeros([FEATURES], tl.float32)
    wave = tl.zeros([FEATURES], tl.float32)
    seen = 0
    for start in range(0, length, TOKENS):
        real = _mask(MASK + row * m_row, start + token, length)
        position = (seen + tl.cumsum(real, 0)).to(tl.float32) - 0.5
        seen += tl.sum(real, 0)
        h = tl.load(
            H + row * h_row + (start + token)[:, None] * h_token + feature[None, :],
            mask=(real > 0)[:, None] & exists[None, :],
            other=0.0,
        ).to(tl.float32)
        mean += tl.sum(h, 0)
        wave += tl.sum(h * tl.cos(3.141592653589793 * frequency[None, :] * position[:, None] / size), 0)
    constant = tl.where(frequency > 0, 2.0, 1.0)
    if NORM == 0:
        wave = wave * tl.sqrt(constant) / size
    elif NORM == 1:
        wave = wave * tl.sqrt(constant / size)
    wave = wave * tl.load(GAMMA + feature, mask=exists, other=0.0)
    wave = tl.where(frequency < count, wave, 0.0)
    at = row * width + feature
    if not FIRST:
        wave += tl.load(F + at, mask=exists, other=0.0)
    tl.store(F + at, wave, mask=exists)
    tl.store(MEAN + at, mean / size, mask=exists)


@triton.jit
def _mask(MASK, token, length):
    return (tl.load(MASK + token, mask=token < length, other=0) != 0).to(tl.int32)


@triton.jit
def _mix(E, MEAN, OUT, rows, width, N: tl.constexpr, SIGMOID: tl.constexpr, FEATURES: tl.constexpr):
    """sum over n of softmax(e)_n mean_n."""
    row = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    exists = feature < width
    top = tl.full([FEATURES], float("-inf"), tl.float32)
    for n in range(N):
        top = tl.maximum(top, tl.load(E + (row * N + n) * width + feature, mask=exists, other=0.0))
    if SIGMOID:
        top = tl.sigmoid(top)
    above = tl.zeros([FEATURES], tl.float32)
    below = tl.zeros([FEATURES], tl.float32)
    for n in range(N):
        e = tl.load(E + (row * N + n) * width + feature, mask=exists, other=0.0)
        if SIGMOID:
            e = tl.sigmoid(e)
        w = tl.exp(e - top)
        above += w * tl.load(MEAN + (n * rows + row) * width + feature, mask=exists, other=0.0)
        below += w
    tl.store(OUT + row * width + feature, above / below, mask=exists)


def pool(
    blocks: Sequence[Tensor],
    mask: Tensor,
    frequency: Tensor,
    gamma: Tensor,
    norm: str,
    logits_of: Callable[[Tensor], Tensor],
    sigmoid: bool,
) -> Tensor:
    """The mixed mean, [B, D] in fp32, without gradient.

    Args:
        blocks: N hidden states [B, L, D], any float dtype.
        mask: [B, L], 1 at real tokens.
        frequency: [D], on the token axis, of each feature's group.
        gamma: [N, D], the weight of each block for it, gain included.
        norm: of the token basis.
        logits_of: the gate from f [B, D] to [B, N, D], before its sigmoid; without batch norm.
        sigmoid: whether the gate has one.
    """
    rows, length, width = blocks[0].shape
    f = torch.empty(rows, width, device=mask.device)
    means = torch.empty(len(blocks), rows, width, device=mask.device)
    mask = mask.contiguous()
    grid = rows, triton.cdiv(width, _FEATURES)
    for n, h in enumerate(blocks):
        h = h if h.stride(2) == 1 else h.contiguous()
        _squeeze[grid](
            h, mask, frequency, gamma[n], f, means[n], length, width, h.stride(0), h.stride(1), mask.stride(0),
            FIRST=n == 0, NORM=_NORMS[norm], TOKENS=_TOKENS, FEATURES=_FEATURES,
        )  # fmt: skip
    logits = logits_of(f).contiguous()
    out = torch.empty_like(f)
    grid = rows, triton.cdiv(width, _MIXED)
    _mix[grid](logits, means, out, rows, width, N=len(blocks), SIGMOID=sigmoid, FEATURES=_MIXED)
    return out
