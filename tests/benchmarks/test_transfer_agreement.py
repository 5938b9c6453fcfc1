"""SentEval's classifier beside scikit-learn's: the script on a small set, and on the real ones where they are."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.transfer_agreement import RandomProjection, compare
from embedlab.evaluation.transfer_data import Split, load_transfer
from tests.evaluation.real import needs_data


def reviews(n: int, seed: int) -> Split:
    """Six words each; a third of the words tell the label."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(n) % 2)
    words = [["good", "fine", "warm"], ["bad", "dull", "cold"]]
    neutral = [f"word{i}" for i in range(30)]
    texts = [
        " ".join([*rng.choice(words[label], 2), *rng.choice(neutral, 4)]) if rng.random() < 0.8 else "word1"
        for label in labels
    ]
    return Split(texts, None, labels)


def test_words_are_projected_and_summed() -> None:
    encode = RandomProjection(400).encode
    one, two, both, empty = encode(["cat", "Dog!", "dog cat !", ""])
    np.testing.assert_allclose(both, one + two, atol=1e-6)
    assert 0.8 < np.linalg.norm(one) < 1.2, "a projection keeps lengths"
    assert not empty.any()


def test_a_fixed_split() -> None:
    splits = {name: reviews(n, n) for name, n in (("train", 200), ("dev", 100), ("test", 400))}
    found = compare("sst2", splits, RandomProjection(16))
    assert 80 < found.sklearn < 95, "nine in ten can be told"
    assert found.all_rows == found.sklearn, "no row is held back where there is a dev split"
    assert abs(found.difference) < 4
    assert 0 < found.error < 3


def test_nested_folds() -> None:
    """So few rows stop SentEval's classifier at random: it only has to be better than chance."""
    found = compare("cr", {"all": reviews(240, 0)}, RandomProjection(8, scale=4))
    assert found.sklearn > 75
    assert found.senteval > 60
    assert found.difference == pytest.approx(found.senteval - found.sklearn)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["mr", "cr", "subj", "mpqa"])
def test_within_half_a_point_on_the_same_folds(task: str) -> None:
    splits = load_transfer(task, needs_data("transfer"))
    found = compare(task, splits, RandomProjection(128))
    assert abs(found.difference) <= 0.5
    assert found.sklearn > 100 * splits["all"].labels.mean() + 0.5 or task in ("cr", "mpqa")
