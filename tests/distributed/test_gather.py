"""Negatives from other ranks give the gradient of one process with the whole batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from embedlab.data.plan import BatchPlan
from embedlab.distributed.gather import batch_order, gather, gather_integers
from embedlab.distributed.in_batch import InBatch
from embedlab.objectives.info_nce import info_nce
from tests.ranks import run_on_two

WORLD, ROWS, WIDTH = 2, 3, 5


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randn(WORLD * ROWS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(3)]
    return draw[0], draw[1], draw[2]


def weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.linspace(-1, 1, WIDTH * WIDTH, dtype=torch.float64).reshape(WIDTH, WIDTH))


def worker(rank: int, results: mp.SimpleQueue) -> None:
    w = weight()
    a, p, n = (x[rank * ROWS : (rank + 1) * ROWS] @ w for x in inputs())
    contrast = info_nce(a, gather(p), 0.5, offset=rank * ROWS, hard_negatives=gather(n))
    contrast.loss.backward()
    dist.all_reduce(w.grad)
    if rank == 0:
        ids = gather_integers(torch.tensor([rank]))
        results.put(((w.grad / WORLD).tolist(), len(ids)))
    else:
        gather_integers(torch.tensor([rank]))


@pytest.mark.timeout(120)
def test_gradient_of_two_ranks_is_that_of_one_big_batch() -> None:
    w = weight()
    a, p, n = (x @ w for x in inputs())
    info_nce(a, p, 0.5, hard_negatives=n).loss.backward()
    queue = mp.get_context("spawn").SimpleQueue()
    run_on_two(worker, queue)
    grad, gathered = queue.get()
    assert gathered == WORLD
    torch.testing.assert_close(torch.tensor(grad, dtype=torch.float64), w.grad, rtol=1e-5, atol=1e-7)


def test_alone_it_is_the_identity() -> None:
    x = torch.randn(2, 3)
    assert gather(x) is x
    assert gather_integers(x) is x


@pytest.mark.parametrize("rows", [1, 4, 7, 8, 12])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_gathered_rows_have_an_order_in_the_batch(
    rows: int, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embedlab.distributed.gather.world_size", lambda: world)
    batch = np.random.default_rng(0).permutation(rows)
    shares = [BatchPlan(8, 1, world=world, rank=r).share(batch) for r in range(world)]
    gathered = torch.from_numpy(np.concatenate(shares))
    assert gathered[batch_order(rows, gathered.device)].tolist() == batch.tolist()
    after = InBatch().following(gathered)
    assert gathered[after][batch_order(rows, gathered.device)].tolist() == np.roll(batch, -1).tolist()
    assert InBatch(gather_negatives=False).following(gathered).tolist() == [*range(1, rows), 0]
