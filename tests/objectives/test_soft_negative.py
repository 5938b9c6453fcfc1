"""The margin of a soft negative: free between its two bounds, and a slope of one outside."""

from __future__ import annotations

import pytest
import torch

from embedlab.objectives.soft_negative import bidirectional_margin, cosine_difference


@pytest.mark.parametrize(("difference", "loss"), [(-0.2, 0.0), (-0.05, 0.05), (0.0, 0.1), (-0.4, 0.1)])
def test_by_hand(difference: float, loss: float) -> None:
    found = bidirectional_margin(torch.tensor([difference]), 0.1, 0.3)
    assert found.item() == pytest.approx(loss, abs=1e-6)


def test_the_difference_is_of_cosines() -> None:
    a, p, n = (torch.randn(5, 4, generator=torch.Generator().manual_seed(s)) for s in range(3))
    unit = torch.nn.functional.normalize
    expected = (unit(a) * unit(n)).sum(1) - (unit(a) * unit(p)).sum(1)
    torch.testing.assert_close(cosine_difference(3 * a, p / 7, n), expected)
