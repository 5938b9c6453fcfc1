"""Packing by kernels: what `Slots` does in lines."""

from __future__ import annotations

import pytest
import torch

from embedlab.kernels.packing import Slots
from tests.interpreted import DEVICE, NEEDS

pytestmark = NEEDS


@pytest.mark.parametrize("length", [1, 7, 12, 64])
@pytest.mark.parametrize("capacity", [5, 20, 40, 600])
def test_slots_are_those_of_the_lines(capacity: int, length: int) -> None:
    torch.manual_seed(capacity + length)
    mask = (torch.rand(5, length) < 0.6).long()
    mask[2] = 0
    want, got = Slots(mask, capacity), Slots.__new__(Slots)
    got.shape, got._kernels = mask.shape, True
    got._place_by_kernel(mask.to(DEVICE), capacity)
    for name in ("cell", "place", "bounds", "used", "_order", "_real"):
        mine, its = getattr(got, name), getattr(want, name)
        assert mine.dtype == its.dtype, name
        assert torch.equal(mine.cpu(), its), name
    x = torch.randint(100, mask.shape)
    assert torch.equal(got.pack(x.to(DEVICE), 7).cpu(), want.pack(x, 7))
    at = mask.argmax(1)
    for mine, its in zip(got.of(at.to(DEVICE)), want.of(at), strict=True):
        assert torch.equal(mine.cpu(), its)
