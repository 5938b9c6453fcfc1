from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from embedlab.evaluation.core import geometry
from embedlab.evaluation.core.vectors import Vectors, encode
from embedlab.evaluation.sts.dev import DevSet
from embedlab.evaluation.sts.sts import STSPairs, evaluate_sts, load_sts, score_pairs
from tests.evaluation.helpers import HashedWords, write_sts_folder


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> STSPairs:
    return load_sts("stsb", write_sts_folder(tmp_path_factory.mktemp("sts"), pairs=200), split="dev")


def test_spearman_equals_scipy_to_1e_9(pairs: STSPairs) -> None:
    dev = DevSet(pairs)
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(len(dev.sentences), 24, generator=generator, dtype=torch.float64)
    place = {s: i for i, s in enumerate(dev.sentences)}
    x = vectors[[place[s] for s in pairs.first]].numpy()
    y = vectors[[place[s] for s in pairs.second]].numpy()
    cosine = (x * y).sum(1) / np.sqrt((x * x).sum(1) * (y * y).sum(1))
    assert dev.score(vectors)["spearman"] == pytest.approx(
        100 * stats.spearmanr(cosine, pairs.gold).statistic, abs=1e-9
    )


def test_sentences_are_distinct_and_scores_equal_the_suite(pairs: STSPairs) -> None:
    dev, encoder = DevSet(pairs), HashedWords()
    assert len(dev.sentences) == len(set(dev.sentences)) == len({*pairs.first, *pairs.second})
    scores = dev.score(encode(encoder, dev.sentences))
    expected = score_pairs(Vectors(encoder, [*pairs.first, *pairs.second]), pairs)
    assert scores["spearman"] == pytest.approx(expected["spearman"], abs=1e-9)
    vectors = Vectors(encoder, dev.sentences)
    keep = pairs.gold > 4
    x = vectors.take([s for s, k in zip(pairs.first, keep, strict=True) if k])
    y = vectors.take([s for s, k in zip(pairs.second, keep, strict=True) if k])
    assert scores["alignment"] == pytest.approx(float(geometry.alignment(x, y)))
    assert scores["uniformity"] == pytest.approx(float(geometry.uniformity(vectors.matrix)))
    assert scores["mean_cosine"] == pytest.approx(float(geometry.mean_cosine(vectors.matrix)))
    assert scores["effective_rank"] == pytest.approx(float(geometry.effective_rank(vectors.matrix)))


def test_geometry_can_be_left_out(pairs: STSPairs) -> None:
    dev = DevSet(pairs)
    vectors = encode(HashedWords(), dev.sentences)
    few, all_of_them = dev.score(vectors, geometry=False), dev.score(vectors)
    assert set(few) == {"spearman", "mean_cosine"}
    assert set(all_of_them) == {"spearman", "mean_cosine", "alignment", "uniformity", "effective_rank"}
    assert few["spearman"] == all_of_them["spearman"]


def test_a_collapsed_encoder_shows(pairs: STSPairs) -> None:
    dev = DevSet(pairs)
    scores = dev.score(torch.ones(len(dev.sentences), 16))
    assert scores["spearman"] == 0
    assert scores["mean_cosine"] > 0.95
    assert scores["effective_rank"] < 10
    assert scores["uniformity"] == pytest.approx(0, abs=1e-6)


def test_wrong_number_of_vectors_is_refused(pairs: STSPairs) -> None:
    dev = DevSet(pairs)
    with pytest.raises(ValueError, match="sentences"):
        dev.score(torch.ones(len(dev.sentences) + 1, 4))


def test_half_precision_vectors_and_gradients(pairs: STSPairs) -> None:
    dev = DevSet(pairs)
    vectors = encode(HashedWords(), dev.sentences)
    full = dev.score(vectors)
    half = dev.score(vectors.bfloat16().requires_grad_())
    assert abs(full["spearman"] - half["spearman"]) < 0.2
    assert abs(full["uniformity"] - half["uniformity"]) < 0.01


@pytest.mark.gpu
def test_scores_on_the_device_equal_the_cpu(pairs: STSPairs) -> None:
    dev = DevSet(pairs)
    vectors = encode(HashedWords(), dev.sentences)
    on_cpu = dev.score(vectors)
    on_gpu = dev.score(vectors.cuda())
    for name, value in on_cpu.items():
        assert on_gpu[name] == pytest.approx(value, abs=1e-4)


def test_evaluate_sts_agrees_on_the_test_split(tmp_path: Path) -> None:
    folder = write_sts_folder(tmp_path)
    encoder = HashedWords()
    dev = DevSet(load_sts("stsb", folder))
    assert dev.score(encode(encoder, dev.sentences))["spearman"] == pytest.approx(
        evaluate_sts(encoder, folder, tasks=["stsb"])["stsb/spearman"], abs=1e-9
    )
