"""Batches in which no key comes twice: rows that repeat a text, or groups that share a label, are put off."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


def first_fit(order: Iterable[int], keys: NDArray[np.uint64], size: int) -> list[NDArray[np.int64]]:
    """Batches of ``size`` items whose keys differ, first fit in an order, those put off before all others.

    An item that is put off waits in a queue of the key that stood in its way, of which a batch takes one: a text of
    a hundred thousand rows costs no more than any other.

    Args:
        order: of the items.
        keys: [n, k], of each item; a key that one item has twice is no hindrance.
        size: items of a batch.

    Returns:
        Whole batches only; what is left over makes none.
    """
    fresh = iter(order)
    waiting: dict[int, deque[int]] = {}
    batches: list[NDArray[np.int64]] = []
    while True:
        batch: list[int] = []
        taken: set[int] = set()

        def put(item: int, batch: list[int] = batch, taken: set[int] = taken) -> int | None:
            """Take the item into the batch, or name the key that stands in its way."""
            own = keys[item].tolist()
            if (key := next((key for key in own if key in taken), None)) is None:
                taken.update(own)
                batch.append(item)
            return key

        for key in list(waiting):
            while len(batch) < size and (queue := waiting.get(key)) and key not in taken:
                if (other := put(queue[0])) is not None:
                    waiting.setdefault(other, deque()).append(queue[0])
                queue.popleft()
            if not waiting.get(key):
                waiting.pop(key, None)
            if len(batch) == size:
                break
        while len(batch) < size and (item := next(fresh, None)) is not None:
            if (met := put(item)) is not None:
                waiting.setdefault(met, deque()).append(item)
        if len(batch) < size:
            return batches
        batches.append(np.array(batch, np.int64))
