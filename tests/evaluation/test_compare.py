"""The paired bootstrap over sentence pairs."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import spearmanr

from embedlab.evaluation.sts.compare import bootstrap, compare_sts, spearman_rows
from embedlab.evaluation.sts.sts import STSPairs, load_sts


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


def test_an_encoder_against_itself_is_no_difference() -> None:
    gold, cosine = np.random.default_rng(0).standard_normal((2, 100))
    assert (bootstrap(gold, cosine, cosine, 200) == 0).all()


def test_swapping_the_encoders_turns_the_sign() -> None:
    gold, a, b = np.random.default_rng(0).standard_normal((3, 100))
    np.testing.assert_allclose(bootstrap(gold, a, b, 120), -bootstrap(gold, b, a, 120))


def test_more_noise_is_worse_and_the_interval_says_so(pairs: STSPairs) -> None:
    found = compare_sts(Table(0.1, 1), Table(1.5, 2), [pairs], resamples=300)
    assert found["stsb/change_low"] <= found["stsb/change"] <= found["stsb/change_high"] < 0
    assert found["stsb/worse"] == 1.0


def test_equal_encoders_are_not_told_apart(pairs: STSPairs) -> None:
    found = compare_sts(Table(0.5, 1), Table(0.5, 2), [pairs], resamples=300)
    assert found["stsb/change_low"] < 0 < found["stsb/change_high"]
