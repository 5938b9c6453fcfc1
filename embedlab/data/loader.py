"""The batches of one device, prepared one ahead in a thread, from any point of any epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from embedlab.data.mix import MixedTable
from embedlab.data.plan import Rows, shares_of
from embedlab.data.plans import Plan
from embedlab.data.resident import ResidentTable
from embedlab.data.table import Table
from embedlab.kernels.packing import token_capacity

Batch = dict[str, Any]


class BatchLoader:
    """Iterates over this device's batches of one epoch.

    The first pass is epoch `epoch`, from batch `start` on; every later pass is the next epoch. `set_epoch`
    and `load_state_dict` move to another point. It draws nothing from torch's random state.

    With ``emit="tokens"`` a batch is ``rows`` int64 [B], ``hash`` int64 [B], and for each field
    ``input_ids``, ``attention_mask`` int64 [B, L] and ``hash`` [B] (`ResidentTable.gather`), in pinned memory
    where there is CUDA. With ``emit="rows"`` it is ``rows``, ``lengths`` (field -> L) and ``token_budgets``
    (field -> true tokens of the batch, rounded up to few distinct numbers), for a `ResidentTable` on the
    device; both are the same on all devices. Both kinds have the numbers ``tokens`` (true ones, all fields) and
    ``padded_tokens``, and ``rows_per_rank`` where devices have not equally many. Of a mix it has the fields of its
    ``data_set``, which it names.

    Args:
        table: rows of tokens.
        plan: which rows are in which batch.
        emit: ``tokens`` or ``rows``.
        pad_to_multiple: L is the longest row of the batch, rounded up to this (and the same for few distinct
            L).

    Attributes:
        epoch: the epoch of the current pass, or of the next one where none has begun.
        start: batches that the next pass leaves out.
        done: batches of the current pass handed over so far, those left out included.
        progress: what only the trainer knows: batches handed over and not yet worked on, and whether it has
            ended the epoch (before the last batch, when it was told to).
    """

    def __init__(
        self, table: Table | MixedTable, plan: Plan, emit: str = "tokens", pad_to_multiple: int = 8
    ) -> None:
        if emit not in ("tokens", "rows"):
            raise ValueError(f"emit={emit!r}: tokens or rows")
        self.table = table
        self.plan = plan
        self.emit = emit
        self.pad_to_multiple = pad_to_multiple
        self.epoch = 0
        self.start = 0
        self.done = 0
        self.progress: Callable[[], tuple[int, bool]] = lambda: (0, False)
        self._begun = False
        self._lengths = {name: table.lengths(name) for name in table.fields}
        # Random batches have all about as many tokens: from the average up, their budgets are few.
        alike = plan.mega_batch == 1
        self._least = {
            name: int(plan.batch_size * found.mean()) if alike else 0 for name, found in self._lengths.items()
        }
        self._host = ResidentTable(table, "cpu") if emit == "tokens" else None

    def __len__(self) -> int:
        """Batches of an epoch, whatever `start` is."""
        return len(self.plan)

    def set_epoch(self, epoch: int) -> None:
        """The next pass is this epoch, from its first batch."""
        self.epoch, self.start, self.done, self._begun = epoch, 0, 0, False

    def state_dict(self) -> dict[str, int]:
        """Where the run is: the epoch, and how many of its batches have been worked on."""
        if not self._begun:
            return {"epoch": self.epoch, "batch": self.start}
        in_flight, over = self.progress()
        done = self.done - in_flight
        if over or done >= len(self):
            return {"epoch": self.epoch + 1, "batch": 0}
        return {"epoch": self.epoch, "batch": done}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """The next pass goes on where `state` was taken."""
        self.set_epoch(state["epoch"])
        self.start = state["batch"]

    def __iter__(self) -> Iterator[Batch]:
        # A generator: nothing happens, and no thread begins, before its first batch is asked for. Lightning
        # makes iterators that it does not use, and tells the epoch after it has made one.
        if self._begun:
            self.epoch += 1
        self._begun = True
        batches, start = self.plan.whole_epoch(self.epoch), self.start
        self.start, self.done = 0, start
        with ThreadPoolExecutor(1, "embedlab-batches", *_same_device()) as thread:
            ahead = thread.submit(self._batch, batches[start]) if start < len(batches) else None
            while ahead is not None:
                batch = ahead.result()
                following = self.done + 1
                ahead = thread.submit(self._batch, batches[following]) if following < len(batches) else None
                self.done = following
                yield batch

    def _width(self, longest: int) -> int:
        return -(-longest // self.pad_to_multiple) * self.pad_to_multiple

    def _batch(self, whole: Rows) -> Batch:
        """This device's share of a batch of all devices."""
        rows = self.plan.share(whole)
        # Rows are gathered to the shapes of a graph, which all devices must have in common.
        widest = rows if self._host is not None else whole
        views = {name: self._lengths[name] for name in self.table.views(int(whole[0]))}
        lengths = {name: self._width(int(found[widest].max())) for name, found in views.items()}
        tokens = {name: int(found[rows].sum()) for name, found in views.items()}
        batch: Batch = {"rows": torch.from_numpy(np.ascontiguousarray(rows))}
        if self._host is not None:
            batch = self._host.gather(batch["rows"], lengths)
        else:
            batch["lengths"] = lengths
            batch["token_budgets"] = self._budgets(whole, views)
        if isinstance(self.table, MixedTable):
            batch["data_set"] = self.table.set_of(int(whole[0]))
        shares = shares_of(len(whole), self.plan.world)
        if len(set(shares)) > 1:
            batch["rows_per_rank"] = shares
        batch["tokens"] = sum(tokens.values())
        batch["padded_tokens"] = len(rows) * sum(lengths.values())
        return _pinned(batch) if torch.cuda.is_available() else batch

    def _budgets(self, whole: Rows, views: Mapping[str, NDArray[np.int32]]) -> dict[str, int]:
        """True tokens of the device that has most of them, by field, rounded up."""
        shares = [self.plan.share(whole, rank) for rank in range(self.plan.world)]
        return {
            name: token_capacity(max(*(int(found[rows].sum()) for rows in shares), self._least[name]))
            for name, found in views.items()
        }


def _pinned(batch: Batch) -> Batch:
    pinned: Batch = {}
    for name, value in batch.items():
        if isinstance(value, torch.Tensor):
            value = value.pin_memory()
        elif isinstance(value, dict):
            value = {k: v.pin_memory() if isinstance(v, torch.Tensor) else v for k, v in value.items()}
        pinned[name] = value
    return pinned


def _same_device() -> tuple[Any, ...]:
    """Arguments for a thread with this thread's CUDA device: pinning would start a context on device 0."""
    if not torch.cuda.is_available():
        return ()
    return torch.cuda.set_device, (torch.cuda.current_device(),)
