"""Means of what a step logs, brought to the host without making it wait for the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embedlab.distributed.gather import world_size


@dataclass
class _Pending:
    step: int
    names: list[str]
    host: Tensor
    event: torch.cuda.Event | None

    def here(self) -> bool:
        return self.event is None or self.event.query()


class Meter:
    """Sums scalars on the device; ``flush`` starts a copy of their means, ``arrived`` gives those that are here."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self._vector: tuple[Tensor, list[str]] | None = None
        self._pending: list[_Pending] = []

    def add(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            value = value.detach().float()
            self._sums[name] = self._sums[name] + value if name in self._sums else value
            self._counts[name] = self._counts.get(name, 0) + 1

    def add_sum(self, totals: Tensor, names: list[str]) -> None:
        """Totals that a captured step adds up by itself: ``[2, len(names)]``, sums and how many values are in each."""
        self._vector = (totals, names)

    def flush(self, step: int) -> None:
        """Start bringing the means since the last flush to the host; they belong to ``step``."""
        if self._vector is not None:
            totals, names = self._vector
            means = totals[0] / totals[1].clamp(min=1)
            totals.zero_()
        elif self._sums:
            names = list(self._sums)
            means = torch.stack([self._sums[n] / self._counts[n] for n in names])
            self._sums, self._counts = {}, {}
        else:
            return
        if world_size() > 1:  # a record is of the whole batch; the host does not wait for it
            torch.distributed.all_reduce(means)
            means /= world_size()
        if means.device.type != "cuda":
            self._pending.append(_Pending(step, names, means.clone(), None))
            return
        host = torch.empty(means.shape, dtype=means.dtype, pin_memory=True)
        host.copy_(means, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._pending.append(_Pending(step, names, host, event))

    def arrived(self, wait: bool = False) -> list[tuple[int, dict[str, float]]]:
        """Means whose copy has ended, oldest first."""
        done = []
        while self._pending and (wait or self._pending[0].here()):
            pending = self._pending.pop(0)
            if pending.event is not None:
                pending.event.synchronize()
            done.append((pending.step, dict(zip(pending.names, pending.host.tolist(), strict=True))))
        return done
