"""Packing and gathering by kernels: what `Slots` and resident data do in lines."""

from __future__ import annotations

import pytest
import torch

from embedlab.data.resident import _ragged_rows
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
    for name in ("cell", "index", "bounds", "used", "_order", "_real"):
        mine, its = getattr(got, name), getattr(want, name)
        assert mine.dtype == its.dtype, name
        assert torch.equal(mine.cpu(), its), name
    x = torch.randint(100, mask.shape)
    assert torch.equal(got.pack(x.to(DEVICE), 7).cpu(), want.pack(x, 7))
    at = mask.argmax(1)
    for mine, its in zip(got.of(at.to(DEVICE)), want.of(at), strict=True):
        assert torch.equal(mine.cpu(), its)


@pytest.mark.parametrize("length", [1, 3, 8, 20, 100])
@pytest.mark.parametrize(("kind", "bits"), [(torch.int16, 2**16 - 1), (torch.int32, 2**32 - 1)])
def test_gathered_rows_are_those_of_the_lines(kind: torch.dtype, bits: int, length: int) -> None:
    from embedlab.kernels.packing_triton import gather_ragged

    torch.manual_seed(0)
    ids = torch.randint(-100, 100, (50,)).to(kind)  # below 0: ids beyond half of the type
    offsets, hashes = torch.tensor([0, 4, 4, 20, 37, 50]), torch.randint(-(2**62), 2**62, (5,))
    rows = torch.tensor([4, 0, 1, 3, 4])
    want = _ragged_rows(ids, offsets, hashes, rows, length, bits, 9)
    got = gather_ragged(*(x.to(DEVICE) for x in (ids, offsets, hashes, rows)), length, bits, 9)
    for mine, its in zip(got, want, strict=True):
        assert mine.dtype == its.dtype
        assert torch.equal(mine.cpu(), its)
    assert int(want[0].max()) > 2**15
