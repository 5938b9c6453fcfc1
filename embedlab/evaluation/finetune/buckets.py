"""Rows of token ids padded into a few fixed lengths, on the device: a batch is a lookup, not a copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

Batch = dict[str, Tensor]
_EVALUATION_TOKENS = {"cuda": 1 << 17}
_FEW_TOKENS = 1 << 12


def padded_length(length: int, longest: int) -> int:
    """The fixed length that a row of `length` tokens is padded to: multiples of 32 up to 128, then of 64."""
    step = 32 if length <= 128 else 64
    return min(-(-max(length, 1) // step) * step, longest)


class Buckets:
    """Rows with targets.

    rows: token ids, of any lengths; targets: name -> [n, ...], what the loss needs of each row.
    A batch has input_ids and attention_mask [B, L] (padded on the right), rows [B] (numbers of the rows), and
    the targets [B, ...]; L is one of a few lengths.
    """

    def __init__(
        self,
        rows: Sequence[Sequence[int]],
        targets: Mapping[str, Tensor],
        pad_id: int,
        device: torch.device | str,
    ) -> None:
        self.count = len(rows)
        self.device = torch.device(device)
        self.targets = {name: value.to(self.device) for name, value in targets.items()}
        sizes = np.array([len(row) for row in rows], dtype=np.int64)
        longest = int(sizes.max(initial=1))
        lengths = np.array([padded_length(int(n), longest) for n in sizes], dtype=np.int64)
        self._buckets: list[tuple[Tensor, Tensor, Tensor]] = []  # ids [m, L], lengths [m], row numbers [m]
        for length in np.unique(lengths):
            members = np.flatnonzero(lengths == length)
            ids = np.full((len(members), int(length)), pad_id, dtype=np.int32)
            for place, i in enumerate(members.tolist()):
                ids[place, : sizes[i]] = rows[i]
            parts = (torch.from_numpy(ids), torch.from_numpy(sizes[members]), torch.from_numpy(members))
            self._buckets.append(tuple(part.to(self.device) for part in parts))  # type: ignore[arg-type]

    def __len__(self) -> int:
        return self.count

    @property
    def lengths(self) -> list[int]:
        """Of the buckets, in tokens."""
        return [ids.shape[1] for ids, _, _ in self._buckets]

    def steps(self, batch_size: int) -> int:
        """Batches of one epoch."""
        return sum(-(-len(ids) // batch_size) for ids, _, _ in self._buckets)

    def epoch(self, batch_size: int, generator: torch.Generator) -> Iterator[Batch]:
        """Every row once, in batches of one bucket each, rows and batches in random order."""
        order = []
        for bucket, (ids, _, _) in enumerate(self._buckets):
            # On the device at once, not chunk by chunk: each copy would make the host wait.
            shuffled = torch.randperm(len(ids), generator=generator).to(self.device)
            order += [(bucket, chunk) for chunk in shuffled.split(batch_size)]
        for i in torch.randperm(len(order), generator=generator).tolist():
            yield self._batch(*order[i])

    def in_order(self) -> Iterator[Batch]:
        """Every row once, the longest first, in batches that fill the device."""
        tokens = _EVALUATION_TOKENS.get(self.device.type, _FEW_TOKENS)
        for bucket in reversed(range(len(self._buckets))):
            ids = self._buckets[bucket][0]
            for chunk in torch.arange(len(ids), device=self.device).split(max(1, tokens // ids.shape[1])):
                yield self._batch(bucket, chunk)

    def _batch(self, bucket: int, index: Tensor) -> Batch:
        ids, lengths, members = self._buckets[bucket]
        rows = members[index]
        positions = torch.arange(ids.shape[1], device=self.device)
        batch = {
            "input_ids": ids[index].long(),
            "attention_mask": (positions < lengths[index, None]).long(),
            "rows": rows,
        }
        return batch | {name: value[rows] for name, value in self.targets.items()}


class Epochs:
    """`steps` batches of `buckets`, epoch after epoch, the same for the same seed."""

    def __init__(self, buckets: Buckets, batch_size: int, steps: int, seed: int) -> None:
        self.buckets, self.batch_size, self.steps, self.seed = buckets, batch_size, steps, seed

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(self.seed)
        given = 0
        while given < self.steps:
            for batch in self.buckets.epoch(self.batch_size, generator):
                if given == self.steps:
                    return
                yield batch
                given += 1
