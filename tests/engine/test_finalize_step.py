"""The accounts of a captured step, against the same written out for each case."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from embedlab.engine.whole_step import finalize_step

CASES = [0.7, math.inf, math.nan]


@pytest.mark.parametrize("clip", [None, 0.5, 10.0])
@pytest.mark.parametrize("updates", [True, False])
def test_accounts_of_every_kind_of_step(clip: float | None, updates: bool) -> None:
    norms = CASES if updates else [0.0]
    for loss, mean, norm, before in itertools.product(CASES, CASES, norms, (0.0, 1.0)):
        if math.isfinite(mean) and not math.isfinite(loss):
            continue  # the mean of the devices' losses is of this one too
        rows, bad_rows = torch.tensor([3, 5]), torch.tensor([-1, -1])
        found_inf, totals = torch.tensor(before), torch.tensor([[1.0, 2.0, 3.0], [4.0, 4.0, 4.0]])
        logged = torch.tensor([loss, 0.25])
        scale = finalize_step(
            torch.tensor(loss), torch.tensor(mean), torch.tensor(norm), logged, rows, bad_rows, found_inf, totals,
            clip, updates,
        )  # fmt: skip
        finite = math.isfinite(mean) and math.isfinite(norm)
        assert float(found_inf) == (before if finite else 1.0)
        elsewhere = math.isfinite(loss) and not math.isfinite(mean)
        first = not finite and before == 0 and not elsewhere
        assert bad_rows.tolist() == ([3, 5] if first else [-1, -1])
        sums = [1 + loss, 2.25, 3 + norm if updates else 3.0]
        torch.testing.assert_close(totals[0], torch.tensor(sums), equal_nan=True)
        assert totals[1].tolist() == [5.0, 5.0, 5.0 if updates else 4.0]
        if math.isfinite(norm):
            assert float(scale) == pytest.approx(1.0 if clip is None else max(1.0, (norm + 1e-6) / clip))
