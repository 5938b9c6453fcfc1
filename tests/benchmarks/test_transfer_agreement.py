"""SentEval's classifier beside scikit-learn's: the script on a small set, and on the real ones where they are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import transfer_agreement as benchmark
from benchmarks.transfer_agreement import RandomProjection, compare, over_seeds
from embedlab.evaluation.core.files import Labelled
from embedlab.evaluation.transfer.transfer_data import load_transfer
from tests.evaluation.real import needs_data


def reviews(n: int, seed: int) -> Labelled:
    """Six words each; a third of the words tell the label."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(n) % 2)
    words = [["good", "fine", "warm"], ["bad", "dull", "cold"]]
    neutral = [f"word{i}" for i in range(30)]
    texts = [
        " ".join([*rng.choice(words[label], 2), *rng.choice(neutral, 4)]) if rng.random() < 0.8 else "word1"
        for label in labels
    ]
    return Labelled(texts, None, labels)


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
    assert found.to_the_end == pytest.approx(found.sklearn, abs=0.5), "the same objective, both at its end"


def test_nested_folds() -> None:
    """So few rows stop SentEval's classifier at random: it only has to be better than chance."""
    found = compare("cr", {"all": reviews(240, 0)}, RandomProjection(8, scale=4), passes=0)
    assert found.sklearn > 75
    assert found.senteval > 60
    assert found.difference == pytest.approx(found.senteval - found.sklearn)
    assert found.to_the_end is None


def test_another_seed_is_another_projection_and_the_mean_has_its_error() -> None:
    splits = {name: reviews(n, n) for name, n in (("train", 200), ("dev", 100), ("test", 400))}
    found = [compare("sst2", splits, RandomProjection(16, seed=seed), passes=0) for seed in range(3)]
    assert len({each.sklearn for each in found}) > 1
    differences = [each.difference for each in found]
    mean = over_seeds(found)["difference"]
    assert mean.mean == pytest.approx(np.mean(differences))
    assert mean.error == pytest.approx(np.std(differences, ddof=1) / 3**0.5)
    assert over_seeds(found[:1])["difference"].error == found[0].error, "of one seed: over its test rows"
    assert "to_the_end" not in over_seeds(found)


def test_seeds_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = "transfer_agreement.py"
    splits = {name: reviews(n, n) for name, n in (("train", 200), ("dev", 100), ("test", 400))}
    monkeypatch.setattr(benchmark, "load_transfer", lambda *_: splits)
    out = tmp_path / "out.json"
    arguments = [script, str(tmp_path), "--tasks", "sst2", "--dim", "8", "--passes", "0", "--out", str(out)]
    monkeypatch.setattr("sys.argv", arguments)
    benchmark.main()
    first = capsys.readouterr().out
    monkeypatch.setattr(benchmark, "compare", None)
    benchmark.main()
    assert capsys.readouterr().out == first, "nothing is run again"
    assert json.loads(out.read_text())["means"]["sst2"]["difference"]["n"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("task", ["mr", "cr", "subj", "mpqa"])
def test_within_half_a_point_on_the_same_folds(task: str) -> None:
    splits = load_transfer(task, needs_data("transfer"))
    found = compare(task, splits, RandomProjection(128))
    assert found.to_the_end is not None
    assert abs(found.difference) <= 0.5
    assert abs(found.to_the_end - found.sklearn) <= 0.5
    assert found.sklearn > 100 * splits["all"].labels.mean() + 0.5 or task in ("cr", "mpqa")
