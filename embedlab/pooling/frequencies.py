"""Which frequency pairs (a on the block axis, b on the token axis) the feature groups of S2Sent get."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice
from typing import Literal

Pair = tuple[int, int]
Order = Literal["fcanet", "zigzag"]
Invalid = Literal["skip", "zero", "grid6"]
GRID = 6
"""Side of the fixed grid that the released code averages every sentence to."""

FCANET_LOW: tuple[Pair, ...] = (
    *((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0), (2, 1), (1, 2)),
    *((2, 2), (0, 3), (3, 0), (4, 0), (0, 4), (1, 3), (3, 1), (0, 5)),
    *((1, 4), (2, 3), (3, 2), (4, 1), (5, 0), (0, 6), (1, 5), (2, 4)),
    *((3, 3), (4, 2), (5, 1), (6, 0), (1, 6), (2, 5), (3, 4), (4, 3)),
)
"""FcaNet's "low" list (Qin et al. 2021), which S2Sent's released code takes over; it is no zigzag."""
LONGEST = len(FCANET_LOW)


def zigzag() -> Iterator[Pair]:
    """JPEG's order: the diagonals a + b = 0, 1, 2, …, walked to and fro, (0, 1) first."""
    for total in count():
        diagonal = [(a, total - a) for a in range(total + 1)]
        yield from diagonal if total % 2 else reversed(diagonal)


def pairs(order: Order) -> tuple[Pair, ...]:
    """The first 32 pairs of an order, ``fcanet`` or ``zigzag``."""
    return FCANET_LOW if order == "fcanet" else tuple(islice(zigzag(), LONGEST))


def select(blocks: int, m: int, order: Order = "fcanet", invalid: Invalid = "skip") -> tuple[Pair, ...]:
    """The ``m`` pairs for ``blocks`` stacked blocks (Low-m).

    A pair with a >= ``blocks`` is no frequency of the block axis: a = blocks vanishes on every grid point,
    and larger ones repeat lower ones with the sign turned.

    Args:
        blocks: N.
        m: number of feature groups; at most 32 unless ``invalid`` is ``skip``.
        order: ``fcanet`` or ``zigzag``.
        invalid: ``skip`` leaves such pairs out and takes the next ones: of the 32 listed, and then (0, b)
            with the lowest b that is still free. ``zero`` and ``grid6`` keep the list: the basis makes the
            group zero, or evaluates it on the 6 x 6 grid.
    """
    listed = pairs(order)
    if invalid != "skip":
        return listed[:m]
    chosen = [p for p in listed if p[0] < blocks][:m]
    free = ((0, b) for b in count() if (0, b) not in chosen)
    return (*chosen, *islice(free, m - len(chosen)))
