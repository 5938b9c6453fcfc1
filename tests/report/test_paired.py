"""Paired differences over seeds and what they resolve; correlation over checkpoints."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr, ttest_rel

from embedlab.report.paired import FEWEST, Difference, paired_difference, relation_to_sts

SCORES = st.floats(-99, 99).map(lambda x: round(x, 3))
# Student's t at 0.975 and at 0.8 with n - 1 degrees of freedom, from a table.
TABLE = {2: (12.7062, 1.3764), 3: (4.3027, 1.0607), 5: (2.7764, 0.9410), 10: (2.2622, 0.8834)}


@settings(deadline=None)
@given(
    st.lists(st.tuples(SCORES, SCORES), min_size=2, max_size=8).filter(
        lambda p: len({a - b for a, b in p}) > 1
    )
)
def test_the_interval_is_scipys(pairs: list[tuple[float, float]]) -> None:
    first, second = (dict(enumerate(side)) for side in zip(*pairs, strict=True))
    found = paired_difference({**first, 77: 5.0, 78: math.nan}, {**second, 78: 1.0, 79: 5.0})
    assert found is not None
    test = ttest_rel(list(first.values()), list(second.values())).confidence_interval(0.95)
    assert (found.n, found.low, found.high) == (len(pairs), *(pytest.approx(x, abs=1e-6) for x in test))
    assert found.mean == pytest.approx((found.low + found.high) / 2, abs=1e-6)


@pytest.mark.parametrize("n", TABLE)
def test_detectable_is_what_both_quantiles_give(n: int) -> None:
    change = [0.1 * i * i for i in range(n)]
    found = paired_difference(dict(enumerate(change)), dict.fromkeys(range(n), 0.0))
    assert found is not None
    error = statistics.stdev(change) / math.sqrt(n)
    level, power = TABLE[n]
    assert found.high - found.mean == pytest.approx(level * error, rel=1e-3)
    assert found.detectable == pytest.approx((level + power) * error, rel=1e-3)


def test_one_seed_has_a_mean_alone() -> None:
    found = paired_difference({0: 90.0, 1: math.nan}, {0: 89.5, 1: 1.0})
    assert found is not None
    assert (found.n, found.mean) == (1, 0.5)
    assert all(map(math.isnan, (found.low, found.high, found.detectable)))
    assert found.text() == "+0.50"
    assert paired_difference({0: math.nan}, {0: 1.0}) is None


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.1, 0.3, "better"),
        (-0.3, -0.1, "worse"),
        (0.0, 0.3, "not resolved"),
        (-0.3, 0.0, "not resolved"),
        (-0.1, 0.3, "not resolved"),
    ],
)
@pytest.mark.parametrize("n", [2, 9])
def test_zero_in_the_interval_is_not_resolved(low: float, high: float, verdict: str, n: int) -> None:
    found = Difference(n, (low + high) / 2, low, high, 1.0)
    assert found.verdict == verdict
    assert Difference(1, 0.2, 0.1, 0.3, 1.0).verdict == "not resolved"
    assert found.text(1) == f"{(low + high) / 2:+.1f} [{low:+.1f}, {high:+.1f}]"
    assert found.text() == f"{(low + high) / 2:+.2f} [{low:+.2f}, {high:+.2f}]"


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=FEWEST, max_size=15))
def test_the_relation_is_spearmans(pairs: list[tuple[int, int]]) -> None:
    runs = [{"e": float(x), "s": float(y)} for x, y in pairs]
    found = relation_to_sts([*runs, {"e": 1.0}, {"s": 1.0}, {"e": math.inf, "s": 1.0}], "e", "s")
    assert found.n == len(pairs)
    if min(len({x for x, _ in pairs}), len({y for _, y in pairs})) == 1:
        assert math.isnan(found.spearman)
    else:
        assert found.spearman == pytest.approx(spearmanr(*zip(*pairs, strict=True)).statistic)
