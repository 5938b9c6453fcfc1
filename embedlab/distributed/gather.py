"""Vectors of all ranks, with gradient: in-batch negatives that cross devices."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_rows_per_rank: tuple[int, ...] | None = None
# Renamed in torch 2.13, where the old names warn.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@contextmanager
def rows_per_rank(rows: Sequence[int] | None) -> Iterator[None]:
    """While in it, the ranks have these many rows of the batch each; None: all have equally many.

    The last batch of an epoch may be uneven. Every rank knows them beforehand (they follow from the number of
    rows), so that nothing has to be asked of the devices.
    """
    global _rows_per_rank
    before, _rows_per_rank = _rows_per_rank, None if rows is None else tuple(rows)
    try:
        yield
    finally:
        _rows_per_rank = before


def weight(rows: Sequence[int]) -> float:
    """What a rank's mean over its rows counts, so that the average of the ranks is the mean over all rows."""
    return rows[rank()] * len(rows) / sum(rows)


def weighted(
    loss: Tensor, logged: Mapping[str, Tensor], rows: Sequence[int]
) -> tuple[Tensor, dict[str, Tensor]]:
    """A rank's loss and what it logs, so that their averages over the ranks are those of the whole uneven batch."""
    share = weight(rows)
    return loss * share, {name: value * share for name, value in logged.items()}


class _Gather(torch.autograd.Function):
    """All-gather whose backward adds up what every rank's loss says of this rank's rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int]) -> Tensor:
        ctx.sizes = sizes
        return _all(x, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].contiguous()
        own = ctx.sizes[dist.get_rank()]
        if len(set(ctx.sizes)) == 1:
            mine = grad.new_empty(own, *grad.shape[1:])
            _reduce_scatter(mine, grad)
            return mine, None
        dist.all_reduce(grad)
        return grad.split(ctx.sizes)[dist.get_rank()].contiguous(), None


def _all(x: Tensor, sizes: list[int]) -> Tensor:
    """Rows ``[sizes[rank], ...]`` of each rank, rank 0 first."""
    if world_size() == 1:
        return x
    longest = max(sizes)
    if min(sizes) == longest:
        whole = x.new_empty(longest * len(sizes), *x.shape[1:])
        _all_gather(whole, x.contiguous())
        return whole
    if len(x) < longest:  # ranks exchange tensors of one shape
        x = torch.cat([x, x.new_zeros(longest - len(x), *x.shape[1:])])
    parts = [torch.empty_like(x) for _ in sizes]
    dist.all_gather(parts, x.contiguous())
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _sizes(n: int) -> list[int]:
    """Rows of every rank, where this one has ``n`` (a multiple of its share: several views of each row)."""
    if _rows_per_rank is None:
        return [n] * world_size()
    return [share * n // _rows_per_rank[rank()] for share in _rows_per_rank]


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if world_size() > 1 else 0


def leave() -> None:
    """Leave the process group, once nothing refers to what was trained in it.

    A thread of gloo that lets go of its last tensors while Python shuts down aborts the process (PyTorch's pull request
    179291); the threads end with the group, and models keep it in cycles.
    """
    dist.destroy_process_group()
    gc.collect()


def first_row(n: int) -> int:
    """Where this rank's ``n`` rows begin among those of all ranks."""
    return sum(_sizes(n)[: rank()])


def gather(x: Tensor) -> Tensor:
    """``[B, D]`` of each rank to all ranks' rows, rank 0 first: ``[W * B, D]``, or as `rows_per_rank` says.

    Each rank scores its own rows against the result, and the data-parallel average of the gradients is then that
    of one process with the whole batch (a gather without gradient would give 1 / W of it).
    """
    return _Gather.apply(x, _sizes(len(x))) if world_size() > 1 else x


def gather_integers(x: Tensor) -> Tensor:
    """The same for integers, which have no gradient."""
    return _all(x, _sizes(len(x)))


def batch_order(rows: int, device: torch.device) -> Tensor:
    """Where the rows of a batch of all ranks, in its order, stand among the gathered ones: ``[rows]``.

    Ranks have every W-th row (`BatchPlan.share`), so that one process with the whole batch has another order.
    """
    world, row = world_size(), torch.arange(rows, device=device)
    owner = row % world
    return owner * (rows // world) + owner.clamp(max=rows % world) + row // world


def gather_rows(vectors: Tensor, rows: Sequence[int], total: int) -> Tensor:
    """Vectors of all ranks in the order of their row numbers: ``[total, D]``, equal on every rank.

    The ranks have as many rows as if each took every W-th; which ones is for ``rows`` to say.
    """
    sizes = [len(range(r, total, world_size())) for r in range(world_size())]
    whole = vectors.new_empty(total, vectors.shape[1])
    whole[_all(torch.tensor(rows, device=vectors.device), sizes)] = _all(vectors, sizes)
    return whole


def share_of_kept(kept: Tensor) -> Tensor | float:
    """What this rank's mean over the rows that it keeps counts in the mean over those that all ranks keep.

    Data-parallel gradients are averaged over ranks; `weight`, which the step puts on an uneven batch, is taken out.
    """
    if world_size() == 1:
        return 1.0
    total = kept.detach().clone()
    dist.all_reduce(total)
    share = kept * world_size() / total.clamp(min=1)
    return share if _rows_per_rank is None else share / weight(_rows_per_rank)


def broadcast_coin(device: torch.device) -> Tensor:
    """True or False with even chances, a tensor on the device, the same on every rank: the first rank's draw.

    It is drawn by the device's generator, so that each replay of a CUDA graph draws anew, and a run with the same
    seed, or one that is resumed, draws the same.
    """
    coin = (torch.rand((), device=device) < 0.5).to(torch.uint8)
    if world_size() > 1:
        dist.broadcast(coin, 0)
    return coin.bool()
