from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from embedlab.evaluation.core.correlation import pair_cosine, pearson, ranks, spearman


@pytest.mark.parametrize("seed", range(5))
def test_ranks_average_ties_as_scipy(seed: int) -> None:
    x = np.random.default_rng(seed).integers(0, 12, size=(3, 200)).astype(np.float64)
    x[0, :5] = [-0.0, 0.0, np.inf, -np.inf, 0.0]
    finite = np.nan_to_num(x)  # scipy 1.12 takes infinities of both signs in a row for no numbers
    assert np.array_equal(ranks(torch.from_numpy(x)).numpy(), stats.rankdata(finite, axis=-1))


@pytest.mark.parametrize("n", [2, 3, 50, 1500])
@pytest.mark.parametrize("ties", [False, True])
def test_correlations_equal_scipy(n: int, ties: bool) -> None:
    generator = np.random.default_rng(n)
    x = generator.normal(size=n)
    y = x + generator.normal(size=n)
    if ties:
        x, y = np.round(x, 1), np.round(y * 2) / 2
    tx, ty = torch.from_numpy(x), torch.from_numpy(y)
    if len(set(x)) > 1 and len(set(y)) > 1:
        assert float(spearman(tx, ty)) == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-9)
        assert float(pearson(tx, ty)) == pytest.approx(stats.pearsonr(x, y).statistic, abs=1e-9)


def test_a_constant_side_is_zero_and_not_nan() -> None:
    constant, other = torch.full((100,), 0.1), torch.arange(100.0)
    assert float(spearman(constant, other)) == 0
    assert float(pearson(constant, other)) == 0


def test_cosine_of_equal_rows_is_exactly_one_and_of_a_zero_row_zero() -> None:
    x = torch.randn(500, 37, generator=torch.Generator().manual_seed(0))
    assert torch.all(pair_cosine(x, x.clone()) == 1)
    x[3] = 0
    cosine = pair_cosine(x, x.roll(1, 0))
    assert cosine[3] == 0
    assert cosine[4] == 0
    nan = x.clone()
    nan[7, 0] = torch.nan
    assert pair_cosine(nan, x)[7] == 0


def test_half_precision_is_compared_in_wide_precision() -> None:
    x = torch.randn(800, 64, generator=torch.Generator().manual_seed(1))
    y = x + torch.randn(800, 64, generator=torch.Generator().manual_seed(2))
    gold = pair_cosine(x, y) + 0.1 * torch.randn(800, generator=torch.Generator().manual_seed(3))
    full = 100 * float(spearman(pair_cosine(x, y), gold))
    half = 100 * float(spearman(pair_cosine(x.bfloat16(), y.bfloat16()), gold))
    assert abs(full - half) < 0.2
