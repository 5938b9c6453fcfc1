"""BEPA's alignment losses and what is logged of them, written out in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from embedlab.errors import UserError
from embedlab.methods.alignment import AlignmentConfig, Vectors, align
from embedlab.objectives.bilingual_nce import bilingual_nce
from embedlab.objectives.regularisers import participation, sigreg, std
from tests.methods.runs import run_of
from tests.pooling.test_blocks import BERT

ROWS, WIDTH = 7, 5


def sides(seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    first, second = torch.randn(2, ROWS, WIDTH, generator=draw)
    return first, first + second


ONLINE, PREDICTED, TARGET = sides(0), sides(1), sides(2)
VECTORS = Vectors(ONLINE, PREDICTED, TARGET, None)


def config(**settings: Any) -> AlignmentConfig:
    return AlignmentConfig(**{"name": "bepa", **settings})


def cosines(a: Tensor, b: Tensor) -> Tensor:
    a, b = a.double(), b.double()
    return (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))


def squared(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).square().sum() / a.numel())


def vicreg(z: Tensor) -> tuple[float, float]:
    """Variance and covariance term (Bardes et al. 2022, equations 1, 3 and 4)."""
    z = z.double()
    covariance = torch.cov(z.T)
    hinge = (1 - (covariance.diagonal() + 1e-4).sqrt()).clamp(min=0).mean()
    off = covariance - torch.diag(covariance.diagonal())
    return float(hinge), float(off.square().sum() / z.shape[1])


def loss(**settings: Any) -> tuple[float, dict[str, float]]:
    torch.manual_seed(5)
    value, stats = align(VECTORS, config(**settings))
    return float(value), {name: float(s) for name, s in stats.items()}


def test_distances_are_of_each_prediction_to_the_other_side() -> None:
    near = (squared(PREDICTED[0], TARGET[1]) + squared(PREDICTED[1], TARGET[0])) / 2
    assert loss(loss="mse")[0] == pytest.approx(near, rel=1e-5)
    away = 1 - (cosines(PREDICTED[0], TARGET[1]) + cosines(PREDICTED[1], TARGET[0])).mean() / 2
    assert loss(loss="cosine")[0] == pytest.approx(float(away), rel=1e-5)


def test_vicreg_is_its_three_terms() -> None:
    near, (v1, c1), (v2, c2) = loss(loss="mse")[0], *(vicreg(0.5 * z) for z in ONLINE)
    halves = VECTORS._replace(online=(0.5 * ONLINE[0], 0.5 * ONLINE[1]))
    for weights in ((25.0, 25.0, 1.0), (2.0, 3.0, 5.0)):
        found, stats = align(halves, config(loss="vicreg", vicreg_weights=weights))
        a, b, c = weights
        assert v1 + v2 > 0.1
        assert float(found) == pytest.approx(a * near + b * (v1 + v2) / 2 + c * (c1 + c2), rel=1e-4)
        assert float(stats["distance"]) == pytest.approx(near, rel=1e-5)
        assert float(stats["variance"]) == pytest.approx((v1 + v2) / 2, rel=1e-4)
        assert float(stats["covariance"]) == pytest.approx(c1 + c2, rel=1e-4)
    assert config().vicreg_weights == (25.0, 25.0, 1.0)


@pytest.mark.parametrize(("weight", "slices"), [(0.1, 256), (3.0, 8)])
def test_sigreg_stands_beside_the_distance(weight: float, slices: int) -> None:
    torch.manual_seed(5)
    normal = float(sigreg(torch.cat(ONLINE), slices))
    found, stats = loss(loss="sigreg", sigreg_weight=weight, sigreg_slices=slices)
    near = loss(loss="mse")[0]
    assert found == pytest.approx(near + weight * normal, rel=1e-5)
    assert (stats["distance"], stats["sigreg"]) == (pytest.approx(near), pytest.approx(normal))
    if weight == 0.1:
        assert loss(loss="sigreg")[0] == found


@pytest.mark.parametrize("name", ["mse", "cosine", "vicreg", "sigreg"])
def test_what_is_logged_is_of_the_encoders_vectors(name: str) -> None:
    _, stats = loss(loss=name)
    assert stats["spread"] == pytest.approx(float(std(torch.cat(ONLINE))))
    assert stats["participation"] == pytest.approx(float(participation(torch.cat(ONLINE))))
    assert stats["positive_cosine"] == pytest.approx(float(cosines(*ONLINE).mean()), abs=1e-6)
    others = cosines(ONLINE[0], ONLINE[1].roll(1, 0)).mean()
    assert stats["negative_cosine"] == pytest.approx(float(others), abs=1e-6)


def test_half_precision_vectors_are_logged_in_full() -> None:
    halves = tuple(z.bfloat16() for z in ONLINE)
    _, stats = align(VECTORS._replace(online=halves), config(loss="mse"))
    exact = cosines(*halves).mean()
    assert float(stats["positive_cosine"]) == pytest.approx(float(exact), abs=1e-6)
    apart = cosines(halves[0], halves[1].roll(1, 0)).mean()
    assert float(stats["negative_cosine"]) == pytest.approx(float(apart), abs=1e-6)


@pytest.mark.parametrize("mask_self", [True, False])
@pytest.mark.parametrize("within", [True, False])
@pytest.mark.parametrize("gather", [True, False])
def test_the_contrast_is_of_predictions_and_targets(mask_self: bool, within: bool, gather: bool) -> None:
    ids = torch.tensor([0, 1, 2, 3, 4, 5, 0]), torch.arange(10, 10 + ROWS)
    settings = {"mask_self": mask_self, "within_lang_neg": within, "gather_negatives": gather}
    for tau, chosen in ((0.07, settings), (0.5, {**settings, "tau": 0.5})):
        found, stats = align(VECTORS._replace(hashes=ids), config(**chosen))
        expected, _ = bilingual_nce(
            PREDICTED,
            TARGET,
            tau,
            mask_self=mask_self,
            within_language=within,
            anchor_hashes=ids,
            candidate_hashes=ids,
        )
        torch.testing.assert_close(found, expected.loss)
        assert stats["align_accuracy"] == expected.accuracy
        assert stats["positive_cosine"] == expected.positive_cosine
        assert "accuracy" not in stats
    assert float(align(VECTORS, config(**chosen))[0]) > float(found)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"vicreg_weights": (-1.0, 0.0, 0.0)}, "vicreg_weights"),
        ({"sigreg_weight": -0.1}, "sigreg_weight"),
        ({"sigreg_slices": 0}, "sigreg_slices"),
    ],
)
def test_weights_have_a_sign(change: dict[str, Any], key: str) -> None:
    least = {"vicreg_weights": (0.0, 0.0, 0.0), "sigreg_weight": 0.0, "sigreg_slices": 1}
    assert replace(config(), loss="sigreg", **least).check(BERT, run_of()) == []
    with pytest.raises(UserError, match=f"method.{key}"):
        replace(config(), **change).check(BERT, run_of())
