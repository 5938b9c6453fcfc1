"""The paired bootstrap over sentence pairs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

from embedlab.errors import UserError
from embedlab.evaluation.sts.compare import (
    Comparison,
    bootstrap,
    change_interval,
    compare_sts,
    spearman_rows,
)
from embedlab.evaluation.sts.sts import SEVEN, STSPairs, load_sts


class Table:
    """An encoder that looks its vectors up."""

    def __init__(self, noise: float, seed: int) -> None:
        self.noise, self.draw = noise, np.random.default_rng(seed)

    def encode(self, sentences: list[str]) -> np.ndarray:
        angle = np.array([float(s.split()[1]) for s in sentences])
        angle = angle + self.noise * self.draw.standard_normal(len(angle))
        return np.stack([np.cos(angle), np.sin(angle)], axis=1)


@pytest.fixture
def pairs(tmp_path) -> STSPairs:  # type: ignore[no-untyped-def]
    """Pairs whose rating falls with the angle between their sentences."""
    draw = np.random.default_rng(0)
    lines = ["score\tsentence1\tsentence2"]
    for i in range(200):
        a, gap = draw.uniform(0, 3), draw.uniform(0, 3)
        lines.append(f"{5 - gap:.3f}\ta{i} {a:.4f}\tb{i} {a + gap:.4f}")
    (tmp_path / "stsb_test.tsv").write_text("\n".join(lines) + "\n")
    return load_sts("stsb", tmp_path)


def test_rows_are_scipys_spearman_with_ties() -> None:
    draw = np.random.default_rng(0)
    x, y = draw.integers(0, 6, (7, 40)).astype(float), draw.standard_normal((7, 40))
    expected = [100 * spearmanr(a, b).statistic for a, b in zip(x, y, strict=True)]
    np.testing.assert_allclose(spearman_rows(x, y), expected, atol=1e-9)
    assert spearman_rows(np.ones((1, 5)), y[:1, :5]).tolist() == [0.0]
    assert not spearman_rows(np.ones((1000, 5)), draw.standard_normal((1000, 5))).any()


def test_an_encoder_against_itself_is_no_difference() -> None:
    gold, cosine = np.random.default_rng(0).standard_normal((2, 100))
    assert (bootstrap(gold, cosine, cosine, 200) == 0).all()


def test_swapping_the_encoders_turns_the_sign() -> None:
    gold, a, b = np.random.default_rng(0).standard_normal((3, 100))
    np.testing.assert_allclose(bootstrap(gold, a, b, 120), -bootstrap(gold, b, a, 120))


@pytest.mark.parametrize("resamples", [1, 49, 50, 51, 120])
def test_each_resample_is_of_the_same_pairs_for_both(resamples: int) -> None:
    """Against one draw for all of them and scipy: what is ranked at a time changes nothing."""
    gold, a, b = np.random.default_rng(1).standard_normal((3, 30))
    rows = np.random.default_rng(7).integers(30, size=(resamples, 30))
    expected = [
        100 * (spearmanr(b[row], gold[row]).statistic - spearmanr(a[row], gold[row]).statistic)
        for row in rows
    ]
    np.testing.assert_allclose(bootstrap(gold, a, b, resamples, seed=7), expected, atol=1e-9)


def test_the_interval_holds_its_share_of_the_resamples() -> None:
    samples = np.arange(-100.0, 901.0)  # 1,001 of them: quantile q is 1,000 q - 100
    expected = {"t/change": 3.0, "t/change_low": -75.0, "t/change_high": 875.0, "t/worse": 100 / 1001}
    assert change_interval("t/", 3.0, samples) == pytest.approx(expected)
    narrow = change_interval("", 3.0, samples, level=0.5)
    assert (narrow["change_low"], narrow["change_high"]) == pytest.approx((150, 650))


def test_tasks_are_resampled_apart_and_averaged_sample_by_sample(pairs: STSPairs) -> None:
    def found(*names: str) -> dict[str, float]:
        tasks = [replace(pairs, task=name) for name in names]
        return compare_sts(Table(0.1, 1), Table(0.5, 2), tasks, resamples=60, seed=3)

    both = found("a", "b")
    # The same pairs in both tasks: they differ by their draws alone.
    assert both["a/change"] == both["b/change"] == pytest.approx(both["sts/change"])
    assert both["a/change_low"] != both["b/change_low"]
    width = {name: both[f"{name}/change_high"] - both[f"{name}/change_low"] for name in ("a", "b", "sts")}
    assert 0 < width["sts"] < min(width["a"], width["b"])
    alone = found("a")
    assert alone == {key: value for key, value in both.items() if key.startswith("a/")}
    seven = found(*SEVEN)
    assert "sts7/change" in seven
    assert not {key for key in seven if key.startswith("sts/")}
    assert not {key for key in both if key.startswith("sts7/")}


def test_a_thousand_resamples_unless_told(tmp_path: Path, pairs: STSPairs) -> None:
    comparison = Comparison()
    found, block = comparison.score(Table(0.5, 1), Table(0.5, 2), [pairs], {})
    assert found == compare_sts(Table(0.5, 1), Table(0.5, 2), [pairs], 1000, 0)
    assert block["scoring_seed"] == 0
    assert "1000 resamples" in block["aggregation"]
    _, block = comparison.score(Table(0.5, 1), Table(0.5, 2), [pairs], {"resamples": 20})
    assert "20 resamples" in block["aggregation"]
    table = comparison.table(("new", "old"), found, "")
    assert table.rows == (
        (
            "stsb",
            f"{found['stsb/change']:+.2f}",
            f"[{found['stsb/change_low']:+.2f}, {found['stsb/change_high']:+.2f}]",
        ),
    )
    with pytest.raises(UserError, match="resamples=0"):
        comparison.load({"resamples": 0, "data_dir": tmp_path})


def test_more_noise_is_worse_and_the_interval_says_so(pairs: STSPairs) -> None:
    found = compare_sts(Table(0.1, 1), Table(1.5, 2), [pairs], resamples=300)
    assert found["stsb/change_low"] <= found["stsb/change"] <= found["stsb/change_high"] < 0
    assert found["stsb/worse"] == 1.0


def test_equal_encoders_are_not_told_apart(pairs: STSPairs) -> None:
    found = compare_sts(Table(0.5, 1), Table(0.5, 2), [pairs], resamples=300)
    assert found["stsb/change_low"] < 0 < found["stsb/change_high"]
