"""What notebooks show: groups of cosines, layers, maps, and figures that have what they say."""

from __future__ import annotations

import numpy as np
import pytest

import embedlab
from embedlab.errors import UserError
from embedlab.evaluation.core.figures import project
from embedlab.evaluation.core.ratings import RatedCosines, read, written
from embedlab.evaluation.sts.sts import load_sts
from embedlab.report.vectors import layer_scores, rated_cosines

pytest.importorskip("matplotlib")
import matplotlib

matplotlib.use("Agg")
from embedlab.evaluation.core import figures


@pytest.fixture
def pairs(tmp_path):  # type: ignore[no-untyped-def]
    lines = ["score\tsentence1\tsentence2"]
    lines += [f"{i % 6}\tthe cat number {i}\ta dog sees {i % 7} birds" for i in range(30)]
    (tmp_path / "stsb_test.tsv").write_text("\n".join(lines) + "\n")
    return load_sts("stsb", tmp_path)


def test_every_pair_is_in_one_group() -> None:
    rated = RatedCosines(np.linspace(0, 1, 11), np.linspace(0, 5, 11))
    groups = rated.groups()
    assert list(groups) == ["0–1", "1–2", "2–3", "3–4", "4–5"]
    assert sum(map(len, groups.values())) == 11
    assert len(groups["4–5"]) == 3
    again = read(written(groups))
    assert all(np.allclose(again[name], values, atol=1e-4) for name, values in groups.items())


def test_separation_grows_with_the_distance_of_the_groups() -> None:
    rating = np.repeat([0.5, 4.5], 50)
    noise = 0.05 * np.random.default_rng(0).standard_normal(100)
    near, far = (RatedCosines(step * (rating > 2) + noise, rating) for step in (0.1, 0.8))
    assert far.separation() > 5 * near.separation() > 0
    assert np.isnan(RatedCosines(noise, np.full(100, 0.5)).separation())


def test_the_last_layer_is_what_mean_pooling_reads(tiny, pairs) -> None:  # type: ignore[no-untyped-def]
    encoder = embedlab.load(tiny("bert"))
    scores = layer_scores(encoder, pairs, batch=7)
    assert len(scores) == encoder.backbone.info.layers + 1
    rated = rated_cosines(encoder, pairs)
    from scipy.stats import spearmanr

    assert scores[-1] == pytest.approx(100 * spearmanr(rated.cosine, rated.rating).statistic, abs=1e-3)


def test_a_map_keeps_clusters_apart_and_is_the_same_again() -> None:
    pytest.importorskip("sklearn")
    draw = np.random.default_rng(0)
    vectors = np.concatenate([draw.standard_normal((20, 8)), 20 + draw.standard_normal((20, 8))])
    points = project(vectors)
    assert points.shape == (40, 2)
    np.testing.assert_allclose(points, project(vectors))
    middle = points[:20].mean(0), points[20:].mean(0)
    spread = np.linalg.norm(points[:20] - middle[0], axis=1).mean()
    assert np.linalg.norm(middle[0] - middle[1]) > 2 * spread
    with pytest.raises(UserError, match="tsne or umap"):
        project(vectors, "pca")


def test_figures_show_every_series(tmp_path) -> None:  # type: ignore[no-untyped-def]
    draw = np.random.default_rng(0)
    drawn = [
        (
            figures.cosine_density(
                {"0–1": draw.random(90), "1–2": draw.random(9), "2–3": draw.random(1)}, "mini"
            ),
            2,
        ),
        (figures.spectrum({"a": np.array([3.0, 2, 1]), "b": np.array([2.0, 1, 1])}), 2),
        (figures.alignment_uniformity({"a": (0.2, -2.0), "b": (0.3, -3.0)}), 2),
        (figures.layer_line({"a": [1, 2, 3]}), 1),
        (figures.scatter(draw.random((6, 2)), list("aabbcc")), 3),
    ]
    for i, (axes, series) in enumerate(drawn):
        assert len(axes.get_lines()) == series
        figures.save(axes, str(tmp_path / f"{i}.png"))
        assert (tmp_path / f"{i}.png").stat().st_size > 1000
    assert figures.weight_map(np.full((3, 8), 1 / 3)).get_images()[0].get_array().shape == (3, 8)
    bars = figures.task_bars({"a": {"STS12": 60.0, "STS13": 70.0}, "b": {"STS12": 61.0}})
    assert len(bars.containers) == 2
