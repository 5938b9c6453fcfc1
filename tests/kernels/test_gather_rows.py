"""Gathering ragged rows by a kernel: what the lines do."""

from __future__ import annotations

import pytest
import torch

from embedlab.data.resident import _ragged_rows
from tests.interpreted import DEVICE, NEEDS

pytestmark = NEEDS


@pytest.mark.parametrize("length", [1, 3, 8, 20, 100])
@pytest.mark.parametrize(("kind", "bits"), [(torch.int16, 2**16 - 1), (torch.int32, 2**32 - 1)])
def test_rows_are_those_of_the_lines(kind: torch.dtype, bits: int, length: int) -> None:
    from embedlab.kernels.gather_rows import gather_ragged

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
