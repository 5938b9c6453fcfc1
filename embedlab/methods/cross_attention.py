"""Cross-attention between twin towers (the CAEL of JTCSE, arXiv 2505.02366), as a stream beside the main
ones.

At a cross-attention layer the attention weights of one tower, from its queries and keys, weight the values of
the other: ``C1 = dropout(softmax(Q1 K1^T / sqrt(d) + M)) V2``. There are no new parameters, and nothing of it
at inference. The paper's wiring is not published; this is the reconstruction of the specification (1.4), and
its alternatives are options.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torch import Tensor

from embedlab.backbones.parts import Frame, Heads, Parts, parts_of
from embedlab.errors import UserError

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


class CrossAttention:
    """Runs both towers' side streams from where they leave the main ones.

    Args:
        first, second: the towers' backbones, of one architecture.
        layers: where the towers exchange attention, counted from 1.
        route: ``query_owner``: the tower whose queries and keys made the weights goes on with the result, in
            its own output projection and feed-forward part. ``value_owner``: the tower whose values were
            weighted.
    """

    def __init__(
        self, first: Backbone, second: Backbone, layers: tuple[int, ...], route: Route = "query_owner"
    ) -> None:
        self.layers = frozenset(layers)
        self.depth = first.info.layers
        self.route = route
        self.first = parts_of(first, "cross-attention")
        self.second = parts_of(second, "cross-attention")
        self.fork = min(layers, default=self.depth + 1) - 1
        """Blocks before the first exchange: up to there the side streams are the main ones."""

    def __call__(self, first: States, second: States, attention_mask: Tensor) -> tuple[States, States]:
        """Side streams of both towers from the main streams' hidden states (N + 1 each), in the same form."""
        with self.first.backbone.arithmetic(attention_mask.device):
            return self._run(first, second, attention_mask)

    def _run(self, first: States, second: States, attention_mask: Tensor) -> tuple[States, States]:
        one, two = list(first[: self.fork + 1]), list(second[: self.fork + 1])
        frames = (self.first.frame(one[0], attention_mask), self.second.frame(two[0], attention_mask))
        for m in range(self.fork, self.depth):
            if m + 1 in self.layers:
                after = self._exchange(m, one[-1], two[-1], frames)
            else:
                after = self.first.layer(m, one[-1], frames[0]), self.second.layer(m, two[-1], frames[1])
            one.append(after[0])
            two.append(after[1])
        if self.fork < self.depth:
            one[-1], two[-1] = self.first.last(one[-1]), self.second.last(two[-1])
        return tuple(one), tuple(two)

    def _exchange(self, m: int, x1: Tensor, x2: Tensor, frames: tuple[Frame, Frame]) -> tuple[Tensor, Tensor]:
        heads1, heads2 = self.first.project(m, x1, frames[0]), self.second.project(m, x2, frames[1])
        p1_v2 = _weigh(self.first, m, heads1, heads2.value, frames[0])
        p2_v1 = _weigh(self.second, m, heads2, heads1.value, frames[1])
        into1, into2 = (p1_v2, p2_v1) if self.route == "query_owner" else (p2_v1, p1_v2)
        return self.first.finish(m, into1, x1), self.second.finish(m, into2, x2)


def _weigh(parts: Parts, m: int, heads: Heads, value: Tensor, frame: Frame) -> Tensor:
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
        raise UserError(f"the towers have {heads[0]} and {heads[1]} attention heads", key="method.tower2")
