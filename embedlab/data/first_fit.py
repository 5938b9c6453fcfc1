"""Batches in which no key comes twice: rows that repeat a text, or groups that share a label, are put off."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


def first_fit(
    order: Iterable[int], keys: NDArray[np.uint64], size: int, least: int | None = None
) -> list[NDArray[np.int64]]:
    """Batches of ``size`` items whose keys differ, first fit in an order, those put off before all others.

    A batch that cannot be filled is set aside, and the rest goes on without its items. What is set aside is gone
    through again, from its end, for as long as that makes a whole batch.

    Args:
        order: of the items.
        keys: [n, k], of each item; a key that one item has twice is no hindrance.
        size: items of a batch.
        least: of a smaller batch, which then comes after the whole ones; items that make up fewer join one of the
            batches, which has up to ``size + least - 1``. None: whole batches only.

    Returns:
        The batches. An item is in none where all that it could be with make up less than one, or with ``least`` have a
        key of it.
    """
    batches: list[list[int]] = []
    rest: list[list[int]] = []
    left = list(order)
    while left:
        items, made, rest = _Items(left, keys), len(batches), []
        while batch := items.fill([], size):
            (batches if len(batch) == size else rest).append(batch)
        left = [item for batch in rest for item in batch][::-1]
        if len(batches) == made:
            break
    if least is not None:
        batches += [batch for batch in rest if len(batch) >= least]
        few = [item for batch in rest if len(batch) < least for item in batch]
        items = _Items(few, keys)
        for batch in batches if few else ():
            items.fill(batch, size + least - 1)
    return [np.array(batch, np.int64) for batch in batches]


class _Items:
    """Items in no batch yet: those of an order, and those put off.

    One that is put off waits in a queue of the key that stood in its way, of which a batch takes one: a text of a
    hundred thousand rows costs no more than any other.
    """

    def __init__(self, order: Iterable[int], keys: NDArray[np.uint64]) -> None:
        self._keys = keys
        self._fresh = iter(order)
        self._waiting: dict[int, deque[int]] = {}

    def fill(self, batch: list[int], most: int) -> list[int]:
        """The batch, with what fits into it, up to so many items."""
        taken = {key for item in batch for key in self._keys[item].tolist()}
        for key in list(self._waiting):
            queue = self._waiting[key]
            while len(batch) < most and queue and key not in taken:
                self._put(queue.popleft(), batch, taken)
            if not queue:
                del self._waiting[key]
            if len(batch) == most:
                break
        while len(batch) < most and (item := next(self._fresh, None)) is not None:
            self._put(item, batch, taken)
        return batch

    def _put(self, item: int, batch: list[int], taken: set[int]) -> None:
        """Take an item into the batch, or let it wait for the key that stands in its way."""
        own = self._keys[item].tolist()
        if (met := next((key for key in own if key in taken), None)) is None:
            taken.update(own)
            batch.append(item)
        else:
            self._waiting.setdefault(met, deque()).append(item)
