"""Plans whose batches follow from the rows' content: no text twice, or so many rows of each label."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from embedlab.data.first_fit import first_fit
from embedlab.data.plan import BatchPlan, Rows, random_bits
from embedlab.errors import UserError


@dataclass(frozen=True)
class DistinctPlan(BatchPlan):
    """Batches of all devices in which no two rows have a text in common, in whatever role.

    Every epoch is planned before it begins. It has as many batches as epoch 0; one in which the order of the rows
    allows fewer, or without `drop_last` others than as many, has the batches of epoch 0 in another order.

    Rows that no whole batch can take are left out with `drop_last`. Without, they make smaller batches, of at least a
    row a device; too few for that join a batch, which has up to one more on each device.

    Args:
        hashes: of the texts of every row [n, roles].

    Raises:
        UserError: no batch can be made.
    """

    hashes: NDArray[np.uint64] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self._first:
            raise UserError(
                f"no batch of {self._whole:,} of the {self.n_rows:,} rows has every text once",
                key="data.no_duplicates",
                value=True,
                fix="more different texts, a smaller data.batch_size, or data.no_duplicates=false",
            )

    def whole_epoch(self, number: int) -> list[Rows]:
        batches = self._planned(number) if number else self._first
        if self.drop_last:
            batches = batches[: len(self)]
        if len(batches) == len(self) and sum(map(len, batches)) >= self.n_rows - self.left:
            return batches
        places = np.argsort(random_bits(self.seed, number, np.arange(len(self)), stream=1))
        return [self._first[place] for place in places]

    @property
    def _whole(self) -> int:
        return self.batch_size * self.world

    @cached_property
    def _first(self) -> list[Rows]:
        return self._planned(0)

    def _planned(self, epoch: int) -> list[Rows]:
        assert self.hashes is not None
        least = None if self.drop_last else self.world
        return first_fit(self._order(epoch).tolist(), self.hashes, self._whole, least)

    def _sizes(self) -> list[int]:
        return [len(batch) for batch in self._first]


@dataclass(frozen=True)
class PerLabelPlan(DistinctPlan):
    """Batches of ``per_label`` rows of each of their labels, on one device: each has the positives of its rows.

    Args:
        per_label: rows of a label in a batch.
        labels: of every row [n].
    """

    per_label: int = 1
    labels: NDArray[np.int64] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert self.labels is not None
        wanted = self._whole // self.per_label
        if self.batch_size % self.per_label:
            raise UserError(
                f"a batch of {self.batch_size:,} rows is no multiple of it", key="data.per_label",
                value=self.per_label, fix="a divisor of data.batch_size",
            )  # fmt: skip
        found = int((np.unique(self.labels, return_counts=True)[1] >= self.per_label).sum())
        if found < wanted:
            raise UserError(
                f"a batch of {self._whole:,} rows needs {wanted} labels of so many rows, and there are {found}",
                key="data.per_label", value=self.per_label,
                fix="a smaller data.batch_size, or more rows of a label",
            )  # fmt: skip
        super().__post_init__()

    def share(self, batch: Rows, rank: int | None = None) -> Rows:
        groups = batch.reshape(-1, self.per_label)
        return groups[self.rank if rank is None else rank :: self.world].reshape(-1)

    def _planned(self, epoch: int) -> list[Rows]:
        assert self.labels is not None
        order = self._order(epoch)
        # Places in the order, label by label, then in groups of `per_label`; what is left of a label makes none.
        places = np.argsort(self.labels[order], kind="stable")
        counts = np.unique(self.labels, return_counts=True)[1]
        within = np.arange(self.n_rows) - np.repeat(np.cumsum(counts) - counts, counts)
        grouped = within < np.repeat(counts - counts % self.per_label, counts)
        groups = places[grouped].reshape(-1, self.per_label)
        groups = groups[np.argsort(groups[:, -1])]  # in the order in which they are full
        keys = self.labels[order[groups[:, :1]]].astype(np.uint64)
        batches = first_fit(range(len(groups)), keys, self._whole // self.per_label)
        return [order[groups[batch]].reshape(-1) for batch in batches]
