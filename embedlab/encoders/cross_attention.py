"""Cross-attention between twin towers (the CAEL of JTCSE, arXiv 2505.02366), as a stream beside the main
ones.

At a cross-attention layer the attention weights of one tower, from its queries and keys, weight the values of
the other: ``C1 = dropout(softmax(Q1 K1^T / sqrt(d) + M)) V2``. There are no new parameters, and nothing of it
at inference. The paper's wiring is not published; this is the reconstruction of the specification (1.4), and
its alternatives are options.
"""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from torch import Tensor

from embedlab.backbones import last_block
from embedlab.backbones.blocks import BlockAdapter, BlockContext, Heads, block_adapter
from embedlab.backbones.slots import InSlots, in_slots
from embedlab.encoders.twin import TwinEncoder, check_addable
from embedlab.errors import UserError
from embedlab.kernels import fused_block, fused_twin
from embedlab.kernels.packing import FullRows, Slots

if TYPE_CHECKING:
    from embedlab.backbones.backbone import Backbone

Route = Literal["query_owner", "value_owner"]
States = tuple[Tensor, ...]
"""Hidden states [B, L, D] before the first block and after each; the last one after the final norm."""


def cross_layers(n: int, layers: int) -> tuple[int, ...]:
    """The ``n`` equally spaced layers ``k, 2k, ..., layers`` (counted from 1) with ``k = layers / n``.

    Raises:
        UserError: n does not divide the depth.
    """
    if n < 1 or layers % n:
        fits = ", ".join(str(d) for d in range(1, layers + 1) if layers % d == 0)
        raise UserError(
            f"cross-attention layers are equally spaced: their number divides the backbone's {layers} layers",
            key="method.n_ca",
            value=n,
            fix=f"one of {fits}",
        )
    step = layers // n
    return tuple(range(step, layers + 1, step))


class Streams(NamedTuple):
    """Hidden states of both towers, N + 1 each: of the main streams (None where they were not wanted whole) and of
    the side streams."""

    main: tuple[States, States] | None
    side: tuple[States, States]
    slots: Slots | FullRows | None = None
    """Of states ``[1, C, D]``, which have no padding. None: they are ``[B, L, D]``, or one token's, ``[B, 1, D]``."""


class CrossAttention:
    """Runs both towers, and beside them the side streams from where the towers first exchange attention.

    Blocks are called one by one: asking transformers for inner states would put hooks into them, at which a compiled
    block breaks in pieces.

    Args:
        first, second: the towers' backbones, of one architecture.
        layers: where the towers exchange attention, counted from 1.
        route: ``query_owner``: the tower whose queries and keys made the weights goes on with the result, in its
            own output projection and feed-forward part. ``value_owner``: the tower whose values were weighted.
    """

    def __init__(
        self, first: Backbone, second: Backbone, layers: tuple[int, ...], route: Route = "query_owner"
    ) -> None:
        self.backbones = first, second
        self.layers = frozenset(layers)
        self.depth = first.info.layers
        self.route = route
        self.first = block_adapter(first, "cross-attention")
        self.second = block_adapter(second, "cross-attention")
        self.fork = min(layers, default=self.depth + 1) - 1
        """Blocks before the first exchange: up to there the side streams are the main ones."""

    def __call__(
        self, input_ids: Tensor, attention_mask: Tensor, main: bool = True, capacity: int | None = None,
        position: Tensor | None = None,
    ) -> Streams:  # fmt: skip
        """Both towers' streams.

        Args:
            input_ids, attention_mask: [B, L].
            main: False leaves the main streams at the fork.
            capacity: compute that many tokens, the true ones and no padding (`Backbone.forward`).
            position: [B], the one token of each row that is read of the last state; the others, and all states
                before, may be left out.
        """
        towers = (self.first, self.second)
        with self.first.backbone.autocast_context(input_ids.device), ExitStack() as stack:
            if capacity is None:
                starts = [parts.embed(input_ids, attention_mask) for parts in towers]
                frames = [parts.frame(x, attention_mask) for parts, x in zip(towers, starts, strict=True)]
                return self._streams(starts, frames, main)
            rows = in_slots(self.first.backbone, input_ids, attention_mask, capacity)
            if all(fused_block.applies(backbone, input_ids.device) for backbone in self.backbones):
                return self._fused(rows, main, position)
            for backbone in self.backbones:
                stack.enter_context(backbone.packing())
            starts = [parts.embed_packed(rows) for parts in towers]
            frames = [parts.packed_frame(x, rows) for parts, x in zip(towers, starts, strict=True)]
            return self._streams(starts, frames, main)._replace(slots=rows.slots)

    def _streams(self, starts: list[Tensor], frames: list[BlockContext], main: bool) -> Streams:
        """From the states before the first blocks."""
        towers = (self.first, self.second)
        shared = [
            [x, *parts.run(x, frame, last=min(self.fork, self.depth))]
            for parts, x, frame in zip(towers, starts, frames, strict=True)
        ]
        whole = None
        if main:
            whole = [
                [*states, *parts.run(states[-1], frame, first=self.fork)]
                for parts, states, frame in zip(towers, shared, frames, strict=True)
            ]
        side = self._side([*shared[0]], [*shared[1]], (frames[0], frames[1]))
        return Streams(None if whole is None else self._ended(*whole), self._ended(*side))

    def _fused(self, rows: InSlots, main: bool, position: Tensor | None) -> Streams:
        """By `embedlab.kernels.fused_twin`."""
        exchange = fused_twin.Exchange(self.layers, main, self.route == "value_owner")
        slot, real = (None, None) if position is None else rows.slots.of(position)
        both = fused_twin.states(
            self.backbones, rows.ids, rows.positions, rows.slots.bounds,
            rows.longest, exchange, slot,
        )  # fmt: skip
        size = rows.ids.shape[1]
        streams = []
        for states in both:
            if slot is None or real is None:
                parts = [x.chunk(len(x) // size) for x in states]
                streams.append([tuple(x[i][None] for x in parts) for i in (0, -1)])
            else:
                last = states[-1].chunk(len(states[-1]) // len(slot))
                streams.append([(last_block.zero_where_absent(last[i], real),) for i in (0, -1)])
        one, two = streams
        slots = rows.slots if slot is None else None
        return Streams((one[0], two[0]) if main else None, (one[1], two[1]), slots)

    def _ended(self, one: list[Tensor], two: list[Tensor]) -> tuple[States, States]:
        return (*one[:-1], self.first.last(one[-1])), (*two[:-1], self.second.last(two[-1]))

    def _side(
        self, one: list[Tensor], two: list[Tensor], frames: tuple[BlockContext, BlockContext]
    ) -> tuple[list[Tensor], list[Tensor]]:
        for m in range(len(one) - 1, self.depth):
            if m + 1 in self.layers:
                after = self._exchange(m, one[-1], two[-1], frames)
            else:
                after = self.first.layer(m, one[-1], frames[0]), self.second.layer(m, two[-1], frames[1])
            one.append(after[0])
            two.append(after[1])
        return one, two

    def _exchange(
        self, m: int, x1: Tensor, x2: Tensor, frames: tuple[BlockContext, BlockContext]
    ) -> tuple[Tensor, Tensor]:
        heads1, heads2 = self.first.project(m, x1, frames[0]), self.second.project(m, x2, frames[1])
        p1_v2 = _weigh(self.first, m, heads1, heads2.value, frames[0])
        p2_v1 = _weigh(self.second, m, heads2, heads1.value, frames[1])
        into1, into2 = (p1_v2, p2_v1) if self.route == "query_owner" else (p2_v1, p1_v2)
        return self.first.finish(m, into1, x1), self.second.finish(m, into2, x2)


def _weigh(parts: BlockAdapter, m: int, heads: Heads, value: Tensor, frame: BlockContext) -> Tensor:
    """The other tower's values by this tower's attention weights.

    The backbone's own kernel takes any values, so the weights need not be written out.
    """
    return parts.attend(m, Heads(heads.query, heads.key, value), frame)


def last_exchange(states: States, layers: tuple[int, ...]) -> Tensor:
    """In-stream wiring: the state after the last exchange before the last layer, or there if alone."""
    depth = len(states) - 1
    inner = [m for m in layers if m < depth]
    return states[max(inner)] if inner else states[-1]


def check_alike(first: Backbone, second: Backbone) -> None:
    """``UserError`` unless the towers' attention maps and values fit each other."""
    for name in ("model_type", "layers", "width"):
        a, b = getattr(first.info, name), getattr(second.info, name)
        if a != b:
            raise UserError(
                f"the towers are of different build: {name} {a} and {b}",
                key="method.tower2",
                fix="two checkpoints of one backbone",
            )
    heads = [t.model.config.num_attention_heads for t in (first, second)]
    if heads[0] != heads[1]:
        told = f"the towers have {heads[0]} and {heads[1]} attention heads"
        raise UserError(told, key="method.tower2", fix="two checkpoints of one backbone")


class CrossedTwin(TwinEncoder):
    """A twin whose towers exchange attention at inference too, for comparison: the released protocol is without.

    Args:
        twin: two towers of one architecture; the weights are shared with it.
        n_ca: layers that exchange attention; divides the depth.
        route: as in `CrossAttention`.

    Raises:
        UserError: not two towers, towers of different build, or layers that cannot be spaced equally.
    """

    def __init__(self, twin: TwinEncoder, n_ca: int, route: Route = "query_owner") -> None:
        super().__init__(twin.towers, twin.weights, twin.card, twin.usage)
        if len(twin.towers) != 2:
            told = f"attention is exchanged between two towers, and there are {len(twin.towers)}"
            raise UserError(told, fix="an encoder of two towers")
        check_addable(twin.towers[0], twin.towers[1], "tower 2")
        first, second = (tower.backbone for tower in twin.towers)
        check_alike(first, second)
        self._name = f"n_ca={n_ca} route={route}"
        self._cross = CrossAttention(first, second, cross_layers(n_ca, first.info.layers), route)
        self.train(twin.training)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, capacity: int | None = None) -> Tensor:
        states = self._cross(input_ids, attention_mask, main=False).side
        parts = [
            weight * tower.pooling(hidden, attention_mask, tower.tokenization.marks)
            for tower, weight, hidden in zip(self.towers, self.weights, states, strict=True)
        ]
        return parts[0] + parts[1]

    def reader(self, skip: int) -> None:
        return None

    def _digest(self) -> str:
        return hashlib.sha256(f"{super()._digest()} {self._name}".encode()).hexdigest()[:16]

    def write(self, folder: Path, dtype: str | None = None, merge: bool = True) -> None:
        raise UserError("a twin is saved without its cross-attention", fix="save the twin itself")
