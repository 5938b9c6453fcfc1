"""Functions on two ranks, and a method's gradients there: tests hold them against those of one big batch."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from embedlab.distributed.gather import leave, rows_per_rank, weight


class Step(nn.Module):
    """What Lightning wraps: one forward of DDP is one training step."""

    def __init__(self, method: Any) -> None:
        super().__init__()
        self.method = method

    def forward(self, batch: dict[str, Any]) -> Tensor:
        return self.method.total(batch)[0]


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_on_two(worker: Callable[..., None], *args: Any, method: str = "spawn") -> Any:
    """Start ``worker(rank, *args)``, a function of a module, in two processes of one group; join what is returned."""
    import torch.multiprocessing as mp

    return mp.start_processes(
        _in_group, args=(free_port(), worker, args), nprocs=2, join=False, start_method=method
    )


def run_on_two(worker: Callable[..., None], *args: Any) -> None:
    """`start_on_two`, until both have ended well."""
    context = start_on_two(worker, *args)
    while not context.join():
        pass


def _in_group(rank: int, port: int, worker: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    worker(rank, *args)
    dist.barrier()
    leave()  # here, where what the worker trained is gone


Half = Callable[[str, int, slice], tuple[Any, dict[str, Any]]]
"""(folder of the backbone, number of the case, a rank's rows) -> the method, and its batch of these rows."""


def two_ranks(half: Half, folder: str, cases: int, *rows: int) -> list[dict[str, Tensor]]:
    """The first rank's gradients of each case; ``half`` is a function of a module; ``rows`` of each or of both."""
    import torch.multiprocessing as mp

    queue = mp.get_context("spawn").SimpleQueue()
    context = start_on_two(_rank, half, folder, cases, rows, queue)
    found = [queue.get() for _ in range(cases)]
    while not context.join():
        pass
    return [{name: torch.tensor(value) for name, value in case.items()} for case in found]


def _rank(rank: int, half: Half, folder: str, cases: int, rows: tuple[int, ...], queue: Any) -> None:
    sizes = rows if len(rows) > 1 else rows * 2
    first = sum(sizes[:rank])
    for case in range(cases):
        method, batch = half(folder, case, slice(first, first + sizes[rank]))
        model = nn.parallel.DistributedDataParallel(Step(method))  # kept: without it no gradient is reduced
        with rows_per_rank(sizes):
            (model(batch) * weight(sizes)).backward()
        if rank == 0:
            queue.put({name: grad.tolist() for name, grad in gradients(method).items()})
        dist.barrier()
