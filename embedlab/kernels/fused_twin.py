"""Twin towers by the kernels of `embedlab.kernels.fused_block`: their main and side streams, and the layers between
which attention is exchanged.

A tower's main and side stream have the same weights: from where they part they go through its products as one batch,
and each weight has one gradient.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from embedlab.kernels.block_parts import (
    AfterAttention,
    Kept,
    Settings,
    Weights,
    after_attention,
    attend,
    attend_backward,
    numbers,
    seed_of,
)
from embedlab.kernels.fused_block import Transformer, embed, run_block, settings_of, weights_of
from embedlab.kernels.varlen_attention import joined_backward, joined_forward

Pair = tuple[Tensor, Tensor]


class Exchange(NamedTuple):
    """Where the towers' last streams exchange attention, and how."""

    layers: Collection[int]
    """Counted from 1."""
    beside: bool
    """The exchanging stream runs beside the main one, which it leaves at the first such layer; else it is the only
    one."""
    by_values: bool
    """A tower goes on with its own values, weighted by the other; else with the other's, weighted by itself."""


def states(
    towers: tuple[Transformer, Transformer], ids: Tensor, positions: Tensor, bounds: Tensor, longest: int,
    exchange: Exchange, slot: Tensor | None = None,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """Of each tower the embeddings and the states after each block, ``[S C, D]``: the main stream, then the side one.

    Args:
        towers: that `fused_block.fusable` is true of, of one build.
        ids, positions, bounds, longest: of the packed rows, as in `fused_block.states`.
        exchange: where and how.
        slot: [R], what is wanted of each stream's last state, ``[S R, D]``; None: all.
    """
    depth = len(towers[0].blocks)
    fork = min(exchange.layers) - 1 if exchange.beside else depth
    # As in `fused_block.states`; the fourth is of the second stream's attention.
    seeds = torch.randint(2**31 - 1, (2, depth + 1, 4, 2), device=ids.device)[..., 0]
    found = [
        [embed(t.model.embeddings, ids[0], positions[0], s[-1, 0])]
        for t, s in zip(towers, seeds, strict=True)
    ]
    for m in range(depth):
        inputs = [states[-1] for states in found]
        if m >= fork:
            inputs = [torch.cat([x, x]) if len(x) == ids.shape[1] else x for x in inputs]
        streams, at = len(inputs[0]) // ids.shape[1], None
        if slot is not None and m == depth - 1:
            at = torch.cat([slot + s * ids.shape[1] for s in range(streams)])
        blocks = [t.blocks[m] for t in towers]
        if m + 1 in exchange.layers:
            settings = [
                settings_of(b, x.shape[1], longest, streams) for b, x in zip(blocks, inputs, strict=True)
            ]
            weights = [w for b in blocks for w in weights_of(b)]
            after = _Exchange.apply(
                *inputs, bounds, seeds[:, m], at, tuple(settings), exchange.by_values, *weights
            )
        else:
            each = zip(blocks, inputs, seeds[:, m], strict=True)
            after = [run_block(b, x, seed, bounds, longest, at, streams) for b, x, seed in each]
        for states, x in zip(found, after, strict=True):
            states.append(x)
    return found[0], found[1]


class _Exchange(torch.autograd.Function):
    """A block of both towers, of whose last streams each has values or weights of the other's attention."""

    @staticmethod
    def forward(
        ctx: Any, one: Tensor, two: Tensor, bounds: Tensor, seeds: Tensor, slot: Tensor | None,
        settings: tuple[Settings, Settings], by_values: bool, *weights: Tensor,
    ) -> Pair:  # fmt: skip
        inputs, ws = (one, two), _halves(weights, Weights)
        joined = [linear(x, w.wj, w.bj) for x, w in zip(inputs, ws, strict=True)]
        outputs: list[Tensor] = []
        saved: list[Tensor] = []
        for i, x in enumerate(inputs):
            seed, own = seeds[i], settings[i]
            context = torch.empty_like(x)
            attend(joined[i], bounds, seed, own, context, last=False)
            weigher, valued = (_last(joined[j], own) for j in _parties(i, by_values))
            joined_forward(
                weigher, bounds, seed_of(seed, own.streams - 1), *numbers(own), values=valued,
                out=_last(context, own),
            )  # fmt: skip
            out, kept = after_attention(context, x, slot, seed, own, ws[i])
            outputs.append(out)
            saved += kept
        ctx.save_for_backward(one, two, bounds, seeds, slot, *joined, *saved, *weights)
        ctx.settings, ctx.by_values = settings, by_values
        return outputs[0], outputs[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        one, two, bounds, seeds, slot, *saved = ctx.saved_tensors
        joined, saved, weights = (
            saved[:2],
            saved[2 : -2 * len(Weights._fields)],
            saved[-2 * len(Weights._fields) :],
        )
        settings: tuple[Settings, Settings] = ctx.settings
        rows = len(bounds) - 1
        parts = zip(
            grads, (one, two), seeds, settings, _halves(saved, Kept), _halves(weights, Weights), strict=True
        )
        after = [
            AfterAttention(grad, x, own.streams * rows, slot, seed, own, kept, w)
            for grad, x, seed, own, kept, w in parts
        ]
        djoined = [torch.empty_like(x) for x in joined]
        for i, own in enumerate(settings):
            arguments = (joined[i], bounds, seeds[i], own, after[i].joined_sums, djoined[i])
            attend_backward(after[i].context, *arguments, last=False)
        sums = [after[i].joined_sums.chunk(s.streams)[-1].view(rows, 3, -1) for i, s in enumerate(settings)]
        for i, own in enumerate(settings):
            weigher, valued = _parties(i, ctx.by_values)
            # Of this attention's gradients those of query and key belong to one tower, that of the values to the other.
            both = torch.empty_like(sums[0])
            joined_backward(
                _last(after[i].context, own), _last(joined[weigher], own), bounds,
                seed_of(seeds[i], own.streams - 1), *numbers(own), both.view(-1),
                values=_last(joined[valued], own), out=_last(djoined[weigher], own),
                values_out=_last(djoined[valued], own),
            )  # fmt: skip
            sums[weigher][:, :2] = both[:, :2]
            sums[valued][:, 2] = both[:, 2]
        ends = [part.end(grad) for part, grad in zip(after, djoined, strict=True)]
        return ends[0][0], ends[1][0], None, None, None, None, None, *ends[0][1:], *ends[1][1:]


def _parties(tower: int, by_values: bool) -> tuple[int, int]:
    """Whose queries and keys, and whose values, a tower goes on with."""
    return (1 - tower, tower) if by_values else (tower, 1 - tower)


def _last(x: Tensor, settings: Settings) -> Tensor:
    """The last stream of ``[S C, D]``."""
    return x.chunk(settings.streams)[-1]


def _halves(tensors: Any, kind: Any) -> tuple[Any, Any]:
    n = len(kind._fields)
    return kind(*tensors[:n]), kind(*tensors[n:])
