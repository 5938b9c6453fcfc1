"""A transformer block in parts with gradients written out: attention of each stream, and all that comes after it.

`embedlab.kernels.fused_block` puts them together to a block, `embedlab.kernels.fused_twin` to two that exchange
attention.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from embedlab.kernels import block_ops
from embedlab.kernels.varlen_attention import joined_backward, joined_forward


class Settings(NamedTuple):
    """Of a block: what is no tensor."""

    heads: int
    longest: int
    scale: float
    drop_weights: float
    drop_attended: float
    drop_fed: float
    eps: tuple[float, float]
    streams: int = 1
    """Of which each has all slots, one after another; each is attended by itself."""


class Weights(NamedTuple):
    """Of a block, those of query, key and value as one (`j`); the others' transposes are what is multiplied."""

    wj: Tensor
    bj: Tensor
    wo: Tensor
    bo: Tensor
    g1: Tensor
    b1: Tensor
    wu: Tensor
    bu: Tensor
    wd: Tensor
    bd: Tensor
    g2: Tensor
    b2: Tensor


class Kept(NamedTuple):
    """What the gradient of `after_attention` needs."""

    read: Tensor
    raised: Tensor
    active: Tensor
    h: Tensor
    z1: Tensor
    stats1: Tensor
    z2: Tensor
    stats2: Tensor


def after_attention(
    context: Tensor, x: Tensor, slot: Tensor | None, seed: Tensor, settings: Settings, w: Weights
) -> tuple[Tensor, Kept]:
    """``h = norm(x + drop(A))``, ``y = norm(h + drop(F(h)))`` of [C, D], or in the slots of ``slot`` [B] alone."""
    read, residual = (context, x) if slot is None else (context[slot], x[slot])
    attended = linear(read, w.wo, w.bo)
    first = block_ops.add_norm(
        attended, residual, w.g1, w.b1, seed[1], settings.drop_attended, settings.eps[0]
    )
    raised = linear(first.y, w.wu, w.bu)
    active = block_ops.gelu(raised)
    fed = linear(active, w.wd, w.bd)
    second = block_ops.add_norm(fed, first.y, w.g2, w.b2, seed[2], settings.drop_fed, settings.eps[1])
    return second.y, Kept(read, raised, active, *first, second.z, second.stats)


class AfterAttention:
    """The gradients of `after_attention`; with that of the joined product, which comes from elsewhere, of the block.

    Args:
        grad: of the output.
        x: input of the block, [C, D].
        rows: of which there will be partial sums of the joined bias's gradient.
        slot, seed, settings: of the forward.
        kept: by the forward.
        w: of the block.

    Attributes:
        context: gradient of the attention's context, [C, D].
        joined_sums: flat fp32, ``rows`` times 3 D, to be filled.
    """

    def __init__(
        self, grad: Tensor, x: Tensor, rows: int, slot: Tensor | None, seed: Tensor, settings: Settings, kept: Kept,
        w: Weights,
    ) -> None:  # fmt: skip
        width, feed = x.shape[1], kept.raised.shape[1]
        norms = (block_ops.norm_rows(kept.h), 3 * width)
        self._sums = block_ops.Sums(
            [norms, (block_ops.gelu_rows(kept.raised), feed), norms, (rows, 3 * width)], w.wj
        )
        second_sums, up_sums, first_sums, self.joined_sums = self._sums.parts
        dh, dfed = block_ops.norm_backward(
            grad.contiguous(), kept.z2, kept.stats2, w.g2, seed[2], second_sums, settings.drop_fed
        )
        self._dwd = dfed.t() @ kept.active
        draised = block_ops.gelu_backward(dfed @ w.wd, kept.raised, up_sums)
        self._dwu = draised.t() @ kept.h
        # `dfed` may be `dh`: it has been read.
        dh.addmm_(draised, w.wu)
        dx, dattended = block_ops.norm_backward(
            dh, kept.z1, kept.stats1, w.g1, seed[1], first_sums, settings.drop_attended
        )
        self._dwo = dattended.t() @ kept.read
        dread = dattended @ w.wo
        if slot is not None:
            # Rows without a token share a slot with another; theirs is 0, so that the sums repeat.
            dread = torch.zeros_like(x).index_add_(0, slot, dread)
            dx = torch.zeros_like(x).index_add_(0, slot, dx)
        self.context, self._x, self._dx, self._w = dread, x, dx, w

    def end(self, djoined: Tensor) -> tuple[Tensor, ...]:
        """Gradients of the block's input and of its `Weights`, from that of query, key and value [C, 3 D]."""
        dwj = djoined.t() @ self._x
        dx = self._dx.addmm_(djoined, self._w.wj)
        second, dbu, first, dbj = self._sums.total()
        dg2, db2, dbd = second.chunk(3)
        dg1, db1, dbo = first.chunk(3)
        return dx, *Weights(dwj, dbj, self._dwo, dbo, dg1, db1, self._dwu, dbu, self._dwd, dbd, dg2, db2)


def seed_of(seed: Tensor, stream: int) -> Tensor:
    """The seed of a stream's attention among those of a block: the first, or of another stream from the fourth on."""
    return seed[0 if stream == 0 else 2 + stream]


def attend(
    joined: Tensor, bounds: Tensor, seed: Tensor, settings: Settings, out: Tensor, last: bool = True
) -> None:
    """Fill ``out`` [S C, D] with the context of each stream, or of all but the last one.

    Args:
        joined: query, key and value, ``[S C, 3 D]``.
        bounds: of the rows of each stream.
        seed, settings: of the block.
    """
    parts = zip(joined.chunk(settings.streams), out.chunk(settings.streams), strict=True)
    for s, (part, into) in enumerate(parts):
        if last or s < settings.streams - 1:
            joined_forward(part, bounds, seed_of(seed, s), *numbers(settings), out=into)


def attend_backward(
    grad: Tensor, joined: Tensor, bounds: Tensor, seed: Tensor, settings: Settings, sums: Tensor, out: Tensor,
    last: bool = True,
) -> None:  # fmt: skip
    """Fill ``out`` [S C, 3 D] with the gradient of `joined`, and ``sums`` with its partial sums; as `attend`."""
    parts = zip(*(x.chunk(settings.streams) for x in (grad, joined, sums, out)), strict=True)
    for s, (above, part, partial, into) in enumerate(parts):
        if last or s < settings.streams - 1:
            joined_backward(above, part, bounds, seed_of(seed, s), *numbers(settings), partial, out=into)


def numbers(settings: Settings) -> tuple[int, int, float, float]:
    """What attention is told."""
    return settings.heads, settings.longest, settings.scale, settings.drop_weights
