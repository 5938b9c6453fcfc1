"""Views of a sentence with tokens repeated (ESimCSE, Wu et al. 2022), shuffled, reversed or deleted (PCL).

All on the batch's device, with shapes that depend on no value and no wait for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from embedlab.config.backbone import BackboneInfo
from embedlab.config.run import RunConfig
from embedlab.data.plan import random_bits
from embedlab.errors import UserError

Augmentation = Literal["shuffle", "reverse", "delete", "repeat", "none"]
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
    ids: Tensor, mask: Tensor, inner: Tensor, rate: float, rule: Rule, pad_id: int, rows: Tensor | None = None,
    seed: int = 0,
) -> Repeated:  # fmt: skip
    """Repeat k distinct inner tokens of each row, each directly behind itself.

    Of a sentence of n tokens k is even from 0 to ``max(2, floor(rate n))``; ``released``, where n counts special
    tokens, from 0 to ``min(10, floor(rate n)) - 1``. No more than there are.

    Args:
        ids, mask: ``[B, L]``, padded on the right.
        inner: ``[B, L]``, 1 at tokens that may be repeated: not at special ones, nor at a template's.
        rate: r.
        rule: how k is drawn.
        pad_id: of new cells.
        rows: int64 ``[B]``; the draw is a function of these numbers and of `seed` alone, whatever else is in the batch.
            None: drawn by the device's generator.
    """
    places = ids.shape[1]
    if rows is None:
        draws, chance = torch.rand(len(ids), places + 1, device=ids.device).split([places, 1], 1)
    else:  # the length of the batch must not choose the number that decides how many
        chance, draws = uniform(rows, places + 1, seed).split([1, places], 1)
    inside = inner.sum(1)
    # In fp64, as `most_repeats` and the release: in fp32 .29 of 100 are 29 tokens, and in fp64 28.
    share = ((mask if rule == "released" else inner).sum(1).double() * rate).floor().long()
    kinds = share.clamp(max=_MOST) if rule == "released" else share.clamp(min=2) + 1
    count = torch.minimum((chance[:, 0] * kinds).long(), inside)
    return double_tokens(ids, mask, inner, count, most_repeats(places, rate, rule), pad_id, draws)


def double_tokens(
    ids: Tensor, mask: Tensor, inner: Tensor, count: Tensor, most: int, pad_id: int, draws: Tensor
) -> Repeated:
    """Repeat as many distinct inner tokens of each row as ``count`` ``[B]`` says, ``most`` at most.

    Args:
        ids, mask, inner, pad_id: as of `repeat_tokens`.
        draws: ``[B, L]``, numbers in [0, 1) by which they are chosen.
    """
    places = ids.shape[1]
    order = draws.masked_fill(~inner.bool(), 2.0).argsort(1).argsort(1)
    doubled = (order < count[:, None]).long()
    place = torch.arange(places, device=ids.device)
    start = place + doubled.cumsum(1) - doubled
    new = torch.arange(places + most, device=ids.device).expand(len(ids), -1).contiguous()
    source = (torch.searchsorted(start, new, right=True) - 1).clamp(0, places - 1)
    real = new < (mask.sum(1) + count)[:, None]
    second = (new > start.gather(1, source)) & real
    return Repeated(torch.where(real, ids.gather(1, source), pad_id), real.long(), second)


def most_more(length: int, kind: Augmentation, share: float) -> int:
    """Tokens that a row of ``length`` tokens may grow by."""
    return round(share * length) if kind == "repeat" else 0


def augmented(
    ids: Tensor, mask: Tensor, inner: Tensor, kind: Augmentation, share: float, pad_id: int
) -> tuple[Tensor, Tensor]:
    """Ids and mask of the view, ``[B, L + most_more]``, padded on the right.

    Args:
        ids, mask: ``[B, L]``, padded on the right.
        inner: ``[B, L]``, 1 at the tokens of the sentence, which stand together; no other is touched.
        kind: ``shuffle`` draws their order; ``reverse`` turns it; ``delete`` leaves a share of them out, but never the
            last one; ``repeat`` doubles a share of them in place. ``none``: the row itself.
        share: of deleted or repeated tokens; their number is rounded.
        pad_id: of new cells.
    """
    if kind == "none":
        return ids, mask
    place, inside = torch.arange(ids.shape[1], device=ids.device), inner.bool()
    n = inner.long().sum(1, keepdim=True)
    first = inner.long().argmax(1, keepdim=True)
    if kind == "reverse":
        return ids.gather(1, torch.where(inside, 2 * first + n - 1 - place, place)), mask
    draws = torch.rand(ids.shape, device=ids.device)
    if kind == "shuffle":  # keys of the sentence stay below the place behind it
        keys = torch.where(inside, first + 0.99 * n * draws, place.float())
        return ids.gather(1, keys.argsort(1)), mask
    count = (share * n[:, 0].double()).round().long()
    if kind == "repeat":
        doubled = double_tokens(ids, mask, inner, count, most_more(ids.shape[1], kind, share), pad_id, draws)
        return doubled.ids, doubled.mask
    count = torch.minimum(count, n[:, 0] - 1).clamp(min=0)
    order = draws.masked_fill(~inside, 2.0).argsort(1).argsort(1)
    gone = (order < count[:, None]) | ~mask.bool()
    kept = ids.gather(1, gone.long().argsort(dim=1, stable=True))
    real = place < (mask.sum(1) - count)[:, None]
    return torch.where(real, kept, pad_id), real.long()


def check_growth(info: BackboneInfo, run: RunConfig, rate: float, more: Callable[[int], int]) -> None:
    """Of a method whose rows grow by ``more(length)`` tokens, about the share ``rate``.

    Raises:
        UserError: rows that do not fit the model, or whose length is not known.
    """
    longest, most = run.data.max_length, info.max_positions
    if most is None:
        return
    if run.template is not None or longest is None:
        raise UserError(
            "how long rows become by repetition is not known before they are read",
            key="data.max_length" if longest is None else "template",
            fix="data.max_length=32, template=none",
        )
    if longest + more(longest) > most:
        raise UserError(
            f"with repeated tokens such rows do not fit the model's {most} positions",
            key="data.max_length",
            value=longest,
            fix=f"data.max_length={int(most / (1 + rate)) - 2} at most",
        )


def uniform(rows: Tensor, columns: int, seed: int = 0) -> Tensor:
    """Numbers in [0, 1), ``[B, columns]``, of a row's number, the column and the seed alone (SplitMix64's mixing)."""
    start = int(random_bits(seed, 0, np.zeros(1, np.int64), stream=0).view(np.int64)[0])
    x = start + (
        rows[:, None] * 0x1E3779B97F4A7C15
        + (1 + torch.arange(columns, device=rows.device)) * 0x3F58476D1CE4E5B9
    )
    for shift, factor in ((30, 0x3F58476D1CE4E5B9), (27, 0x14D049BB133111EB)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return ((x >> 40) & 0xFFFFFF).float() / (1 << 24)
