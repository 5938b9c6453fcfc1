"""Vectors of all ranks, with gradient: in-batch negatives that cross devices."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Gather(torch.autograd.Function):
    """All-gather whose backward adds up what every rank's loss says of this rank's rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        grad = grads[0].contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()].contiguous()


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if world_size() > 1 else 0


def gather(x: Tensor) -> Tensor:
    """``[B, D]`` of each rank to ``[W * B, D]``, rank 0 first; the same B on every rank.

    Each rank scores its own rows against the result, and the data-parallel average of the gradients is then that
    of one process with the whole batch (a gather without gradient would give 1 / W of it).
    """
    return _Gather.apply(x) if world_size() > 1 else x


def gather_ids(x: Tensor) -> Tensor:
    """The same for integers, which have no gradient."""
    if world_size() == 1:
        return x
    parts = [torch.empty_like(x) for _ in range(world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def agreed_coin(device: torch.device) -> Tensor:
    """True or False with even chances, a tensor on the device, the same on every rank: the first rank's draw.

    It is drawn by the device's generator, so that each replay of a CUDA graph draws anew, and a run with the same
    seed, or one that is resumed, draws the same.
    """
    coin = (torch.rand((), device=device) < 0.5).to(torch.uint8)
    if world_size() > 1:
        dist.broadcast(coin, 0)
    return coin.bool()
