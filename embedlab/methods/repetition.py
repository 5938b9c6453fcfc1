"""A view of a sentence in which some of its tokens are repeated (ESimCSE, Wu et al. 2022).

All on the batch's device, with shapes that depend on no value and no wait for the device.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Redraw = Literal["step", "once"]
Rule = Literal["paper", "released"]
_MOST = 10
"""Bound of the released draw."""


class Repeated(NamedTuple):
    """Rows ``[B, L + k]``, padded on the right."""

    ids: Tensor
    mask: Tensor
    second: Tensor
    """Bool, where the second one of a repeated token stands."""


def most_repeats(length: int, rate: float, rule: Rule) -> int:
    """Tokens that a row of ``length`` tokens may grow by."""
    share = math.floor(rate * length)
    return max(0, min(_MOST, share) - 1) if rule == "released" else max(2, share)


def repeat_tokens(
    ids: Tensor, mask: Tensor, inner: Tensor, rate: float, rule: Rule, pad_id: int, rows: Tensor | None = None
) -> Repeated:
    """Repeat k distinct inner tokens of each row, each directly behind itself.

    Of a sentence of n tokens k is even from 0 to ``max(2, floor(rate n))``; ``released``, where n counts special
    tokens, from 0 to ``min(10, floor(rate n)) - 1``. No more than there are.

    Args:
        ids, mask: ``[B, L]``, padded on the right.
        inner: ``[B, L]``, 1 at tokens that may be repeated: not at special ones, nor at a template's.
        rate: r.
        rule: how k is drawn.
        pad_id: of new cells.
        rows: int64 ``[B]``; the draw is a function of these numbers alone. None: drawn by the device's generator.
    """
    places = ids.shape[1]
    draws = torch.rand(len(ids), places + 1, device=ids.device) if rows is None else uniform(rows, places + 1)
    inside = inner.sum(1)
    share = ((mask if rule == "released" else inner).sum(1) * rate).floor().long()
    kinds = share.clamp(max=_MOST) if rule == "released" else share.clamp(min=2) + 1
    count = torch.minimum((draws[:, -1] * kinds).long(), inside)
    order = draws[:, :-1].masked_fill(~inner.bool(), 2.0).argsort(1).argsort(1)
    doubled = (order < count[:, None]).long()
    place = torch.arange(places, device=ids.device)
    start = place + doubled.cumsum(1) - doubled
    width = places + most_repeats(places, rate, rule)
    new = torch.arange(width, device=ids.device).expand(len(ids), -1).contiguous()
    source = (torch.searchsorted(start, new, right=True) - 1).clamp(0, places - 1)
    real = new < (mask.sum(1) + count)[:, None]
    second = (new > start.gather(1, source)) & real
    return Repeated(torch.where(real, ids.gather(1, source), pad_id), real.long(), second)


def uniform(rows: Tensor, columns: int) -> Tensor:
    """Numbers in [0, 1), ``[B, columns]``, of a row's number and the column alone (SplitMix64's mixing)."""
    x = (
        rows[:, None] * 0x1E3779B97F4A7C15
        + (1 + torch.arange(columns, device=rows.device)) * 0x3F58476D1CE4E5B9
    )
    for shift, factor in ((30, 0x3F58476D1CE4E5B9), (27, 0x14D049BB133111EB)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return ((x >> 40) & 0xFFFFFF).float() / (1 << 24)
