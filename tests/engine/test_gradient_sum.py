"""The sum of gradients over two ranks: as they come and in the end, whatever comes, and in whatever parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from embedlab.engine import gradient_sum
from embedlab.engine.gradient_sum import GradientSum
from tests.ranks import run_on_two

STEPS = 4


class Net(nn.Module):
    """A scalar, a layer that one of three steps leaves out, and one whose gradient comes in two parts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.odd, self.twice = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 7)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, odd: bool) -> Tensor:
        h = self.first(x).tanh()
        return self.scale * (self.odd(h) if odd else h)

    def backward(self, x: Tensor, odd: bool) -> None:
        """The last layer's gradient in two backward passes, as chunks of rows give it."""
        h = self(x, odd)
        leaf = h.detach().requires_grad_()
        for rows in leaf.split(2):
            self.twice(rows).square().sum().backward()
        h.backward(leaf.grad)


def worker(rank: int, out: str) -> None:
    gradient_sum._BUCKET = 250
    net = Net().double()
    names = {id(p): n for n, p in net.named_parameters()}
    sizes: list[int] = []
    send = dist.all_reduce
    dist.all_reduce = lambda x, *a, **k: [sizes.append(len(x)), send(x, *a, **k)][1]
    sums = GradientSum(list(net.parameters()), {}, False, torch.device("cpu"))
    for p in net.parameters():
        sums.watch(p, [p])
    connected = sizes.copy()
    batches = torch.randn(2, 4, 5, dtype=torch.float64)
    found: list[dict[str, Any]] = []
    for step in range(2 * STEPS):
        odd = step % 3 != 2
        net.zero_grad()
        with sums.coming(odd):
            net.backward(batches[rank] + step, odd)
            sent = sum(b.sent for b in sums._buckets)
        grads = {id(p): p.grad for p in net.parameters() if p.grad is not None}
        total, mean, failed = sums(
            grads, torch.tensor(rank + 1.0), torch.tensor(float(rank == 1 and step == 3))
        )
        got = {names[k]: v.clone() for k, v in total.items()}
        found.append({"sent": sent, "sums": got, "mean": float(mean), "failed": float(failed)})
    if rank == 0:
        torch.save({"steps": found, "batches": batches, "buckets": len(sums._buckets),
                    "connected": connected, "sent": sizes[len(connected):]}, out)  # fmt: skip


@pytest.mark.timeout(300)
def test_sums_are_those_of_both_ranks(tmp_path: Path) -> None:
    run_on_two(worker, str(tmp_path / "found"))
    found = torch.load(tmp_path / "found", weights_only=True)
    assert set(found["sent"]) == set(found["connected"])
    net = Net().double()
    for step, one in enumerate(found["steps"]):
        odd = step % 3 != 2
        net.zero_grad()
        for batch in found["batches"]:
            net.backward(batch + step, odd)
        wanted = {n: p.grad for n, p in net.named_parameters() if p.grad is not None}
        assert one["sums"].keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(one["sums"][name], value, rtol=1e-12, atol=1e-12)
        # The first step of each shape shows what comes; two parts are never sent before the end.
        assert (one["sent"] > 0) == (step not in (0, 2))
        assert one["sent"] < found["buckets"]
        assert one["mean"] == 1.5
        assert one["failed"] == float(step == 3)
