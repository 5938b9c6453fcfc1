"""Which rows are in which batch: a pure function of a few numbers, so any point of a run is found again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from embedlab.errors import UserError

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class BatchPlan:
    """The batches of one device in every epoch.

    Ranks get disjoint rows that together are the epoch, and equally many batches. The order of an epoch
    depends on `seed` and the epoch's number alone, and is the same for every rank.

    Args:
        n_rows: rows of the table.
        batch_size: rows of a batch on one device.
        seed: of the order.
        world: devices.
        rank: this device.
        drop_last: leave out what is less than a batch on every device. Otherwise the last batch is smaller
            (or, where too little is left to give each device a row, larger by one).
        mega_batch: batches (over all devices) that are filled from one pool of rows, sorted by length; their
            order is random again. 1 sorts nothing.
        shuffle: False keeps the order of the table.
        lengths: tokens of every row [n], for `mega_batch`.

    Raises:
        UserError: fewer rows than one batch on every device needs.
    """

    n_rows: int
    batch_size: int
    seed: int = 0
    world: int = 1
    rank: int = 0
    drop_last: bool = True
    mega_batch: int = 1
    shuffle: bool = True
    lengths: NDArray[np.int32] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank {self.rank} of {self.world}")
        if self.mega_batch > 1 and self.lengths is None:
            raise ValueError("mega_batch needs the lengths of the rows")
        if self.n_rows < self.world:
            raise UserError(
                f"{_rows(self.n_rows)} less than one a device",
                key="trainer.devices",
                value=self.world,
                fix="more rows, or fewer devices",
            )
        if self.drop_last and self.n_rows < self.batch_size * self.world:
            devices = f" on {self.world} devices" if self.world > 1 else ""
            raise UserError(
                f"{_rows(self.n_rows)} less than one batch of {self.batch_size * self.world:,}{devices}",
                key="data.batch_size",
                value=self.batch_size,
                fix="more rows, or a smaller data.batch_size",
            )

    def __len__(self) -> int:
        return len(self._sizes())

    @property
    def left(self) -> int:
        """Rows that fit into no batch of an epoch."""
        return self.n_rows - sum(self._sizes())

    def epoch(self, number: int) -> list[Rows]:
        """The row numbers of each batch of this rank in epoch `number`."""
        return [self.share(batch) for batch in self.whole_epoch(number)]

    def share(self, batch: Rows, rank: int | None = None) -> Rows:
        """A rank's rows of a batch of all devices; None: this rank's."""
        # Every other row rather than one half: the ranks of a batch have rows of the same length.
        return batch[self.rank if rank is None else rank :: self.world]

    def whole_epoch(self, number: int) -> list[Rows]:
        """The row numbers of each batch of all devices in epoch `number`."""
        order = self._order(number)
        sizes = self._sizes()
        bounds = np.cumsum([0, *sizes])
        batches = []
        for first in range(0, len(sizes), self.mega_batch):
            last = min(first + self.mega_batch, len(sizes))
            pool = order[bounds[first] : bounds[last]]
            cuts = bounds[first:last] - bounds[first]
            if self.mega_batch > 1:
                assert self.lengths is not None
                pool = pool[np.argsort(self.lengths[pool], kind="stable")]
                # Batches of one size change places; another one at the end stays there.
                whole = int(np.sum(np.equal(sizes[first:last], sizes[first])))
                places = np.argsort(random_bits(self.seed, number, np.arange(first, first + whole), stream=1))
                cuts = np.concatenate([cuts[places], cuts[whole:]])
                sized = [sizes[first + i] for i in (*places, *range(whole, last - first))]
            else:
                sized = sizes[first:last]
            batches += [pool[cut : cut + size] for cut, size in zip(cuts, sized, strict=True)]
        return batches

    def _order(self, epoch: int) -> Rows:
        if not self.shuffle:
            return np.arange(self.n_rows, dtype=np.int64)
        keys = random_bits(self.seed, epoch, np.arange(self.n_rows), stream=0)
        return np.argsort(keys, kind="stable").astype(np.int64)

    def _sizes(self) -> list[int]:
        """Rows of each batch over all devices."""
        whole, rest = divmod(self.n_rows, self.batch_size * self.world)
        sizes = [self.batch_size * self.world] * whole
        if self.drop_last or rest == 0:
            return sizes
        if (
            rest < self.world
        ):  # too few to give each rank one: some ranks have one row more in the batch before
            return [*sizes[:-1], sizes[-1] + rest]
        return [*sizes, rest]


def _rows(number: int) -> str:
    return "1 row is" if number == 1 else f"{number:,} rows are"


def tell_dropped(error: UserError, read: int, dropped: Mapping[str, int]) -> None:
    """Add to an error about too few rows how many were read, and why those that are missing were left out."""
    if dropped:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items())
        error.message += f", of {read:,} that were read; dropped: {reasons}"


def shares_of(rows: int, world: int) -> tuple[int, ...]:
    """Rows of each rank in a batch of so many."""
    return tuple(len(range(rank, rows, world)) for rank in range(world))


def random_bits(seed: int, epoch: int, index: NDArray[np.int64], stream: int) -> NDArray[np.uint64]:
    """64 random bits for each index: the SplitMix64 finaliser (Steele, Lea and Flood 2014), applied twice.

    Not `numpy.random`, whose streams may change between versions: a run resumed years later has the same
    order.
    """
    with np.errstate(over="ignore"):
        key = _mix(_mix(np.uint64(seed % 2**64) + GOLDEN) + np.uint64(2 * epoch + stream))
        return _mix(_mix(index.astype(np.uint64) * GOLDEN + key))


GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: NDArray[np.uint64] | np.uint64) -> NDArray[np.uint64]:
    x = np.asarray(x, np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
