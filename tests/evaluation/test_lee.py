from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
from scipy import stats

from embedlab.errors import UserError
from embedlab.evaluation import suite
from embedlab.evaluation.core.vectors import encode
from embedlab.evaluation.sts import lee
from tests.evaluation.helpers import HashedWords

needs_gensim = pytest.mark.skipif(
    importlib.util.find_spec("gensim") is None, reason="gensim (extra quickstart) is not installed"
)


def made_up(n: int = 50, noise: float = 0.3) -> tuple[lee.LeeSet, torch.Tensor]:
    """A set whose ratings are the cosines of hidden vectors plus noise, and those vectors."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(n, 12))
    u = x / np.linalg.norm(x, axis=1, keepdims=True)
    error = np.triu(generator.normal(0, noise, size=(n, n)), 1)
    return lee.LeeSet([f"d{i}" for i in range(n)], u @ u.T + error + error.T), torch.from_numpy(x)


@needs_gensim
def test_the_published_documents_and_ratings() -> None:
    data = lee.load_lee()
    assert len(data.documents) == 50
    assert len(set(data.documents)) == 50
    assert data.human.shape == (50, 50)
    assert np.array_equal(data.human, data.human.T)
    upper = data.human[np.triu_indices(50, 1)]
    assert len(upper) == 1225
    assert upper.min() > 0
    assert upper.max() <= 1
    assert data.human[0, 1] == 0.3
    assert sum("£" in document for document in data.documents) == 1
    assert data.documents[0].startswith("The national executive")


@needs_gensim
def test_suite_finds_a_clear_correlation_for_shared_words() -> None:
    scores, protocol = suite("lee").run(HashedWords(512), {"resamples": 100})
    assert 10 < scores["lee/spearman"] < 70
    assert scores["lee/spearman_low"] < scores["lee/spearman"] < scores["lee/spearman_high"]
    assert scores["lee/pearson_low"] < scores["lee/pearson"] < scores["lee/pearson_high"]
    assert protocol["scoring_seed"] == lee.SEED
    assert "lee/uniformity" in scores
    assert suite("lee").run(HashedWords(512), {"resamples": 100})[0] == scores, "same seed, same interval"


def test_point_estimates_equal_scipy() -> None:
    data, vectors = made_up()
    scores = lee.score(vectors, data, resamples=10)
    u = torch.nn.functional.normalize(vectors).numpy()
    upper = np.triu_indices(50, 1)
    cosine = (u @ u.T)[upper]
    assert scores["spearman"] == pytest.approx(
        100 * stats.spearmanr(cosine, data.human[upper]).statistic, abs=1e-6
    )
    assert scores["pearson"] == pytest.approx(
        100 * stats.pearsonr(cosine, data.human[upper]).statistic, abs=1e-6
    )


def test_paired_comparison_is_tighter_than_the_two_intervals_and_signed() -> None:
    data, good = made_up()
    poor = good + 0.7 * torch.randn(good.shape, generator=torch.Generator().manual_seed(1), dtype=good.dtype)
    change = lee.compare(poor, good, data, resamples=200)
    before, after = lee.score(poor, data, 200), lee.score(good, data, 200)
    assert change["spearman_change"] == pytest.approx(after["spearman"] - before["spearman"])
    assert change["spearman_change_low"] > 0
    assert change["spearman_worse"] == 0
    backwards = lee.compare(good, poor, data, resamples=200)
    assert backwards["spearman_change"] == pytest.approx(-change["spearman_change"])
    assert backwards["spearman_change_high"] == pytest.approx(-change["spearman_change_low"])
    same = lee.compare(good, 3 * good, data, resamples=50)
    assert same["spearman_change_low"] == pytest.approx(0, abs=1e-4)
    assert same["spearman_change_high"] == pytest.approx(0, abs=1e-4)


def test_interval_covers_documents_not_pairs() -> None:
    """Pairs share documents, so an interval over pairs would be too narrow: ours must be wider."""
    data, vectors = made_up(noise=0.6)
    scores = lee.score(vectors, data, resamples=400)
    u = torch.nn.functional.normalize(vectors).numpy()
    upper = np.triu_indices(50, 1)
    cosine, human = (u @ u.T)[upper], data.human[upper]
    generator = np.random.default_rng(0)
    drawn = [generator.integers(0, 1225, 1225) for _ in range(400)]
    low, high = np.quantile([stats.spearmanr(cosine[i], human[i]).statistic for i in drawn], [0.025, 0.975])
    assert scores["spearman_high"] - scores["spearman_low"] > 1.1 * 100 * (high - low)


def test_collapsed_encoder_scores_zero() -> None:
    data, vectors = made_up()
    scores = lee.score(torch.ones_like(vectors), data, resamples=20)
    assert scores["spearman"] == scores["spearman_low"] == scores["spearman_high"] == 0


def test_missing_package_and_files(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=r"lee\.cor: is missing"):
        lee.load_lee(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install gensim"):
        lee.load_lee()


def test_encoder_result_shape_is_checked() -> None:
    class Flat:
        def encode(self, sentences):  # type: ignore[no-untyped-def]
            return np.zeros(len(sentences))

    with pytest.raises(ValueError, match="expected"):
        encode(Flat(), ["a", "b"])
