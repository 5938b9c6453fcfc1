from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from embedlab.errors import UserError
from embedlab.evaluation import suite
from embedlab.evaluation.core import geometry
from embedlab.evaluation.core.nearest import TopK
from embedlab.evaluation.core.ratings import read, separation
from tests.evaluation.helpers import HashedWords, write_sts_folder


def random(n: int, d: int, seed: int = 0) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


def rotation(d: int) -> Tensor:
    return torch.linalg.qr(random(d, d, 9).double()).Q.float()


def test_identical_vectors() -> None:
    x = random(1, 16).repeat(20, 1)
    assert float(geometry.alignment(x, x)) == 0
    assert float(geometry.uniformity(x)) == pytest.approx(0, abs=1e-6)
    assert float(geometry.mean_cosine(x)) == pytest.approx(1)
    assert float(geometry.effective_rank(x)) == 1
    assert float(geometry.rankme(x)) == pytest.approx(1, abs=1e-3)
    assert float(geometry.pc1_share(x)) == pytest.approx(0, abs=1)
    assert math.isfinite(geometry.pc1_share(x))
    assert math.isnan(geometry.alignment_ratio(x[:5], x[:5], x))
    assert math.isnan(geometry.uniformity_ratio(x[:5], x[:5], x))


def test_nearly_identical_float32_vectors_have_rank_one() -> None:
    """What batch effects leave of a collapsed encoder is float32 rounding: not a full-rank cloud."""
    x = random(1, 64).repeat(300, 1) * (1 + 1e-7 * random(300, 64, 1))
    assert float(geometry.effective_rank(x)) == 1


@pytest.mark.parametrize("rows", [1, 2, 300])
def test_tensors_are_made_where_the_vectors_are(rows: int) -> None:
    """The default is a device without values, as a second card would be another one."""
    x, y, z = random(rows, 6), random(4, 6, 1), random(4, 6, 2)
    expected = geometry.summary(x, y, z)
    with torch.device("meta"):
        found = geometry.summary(x, y, z)
        top = TopK(y, 3)
        top.add(x)
    assert found == pytest.approx(expected, nan_ok=True)
    assert top.rows.device == top.scores.device == x.device


def test_two_antipodal_vectors() -> None:
    x = torch.tensor([[3.0, 4.0], [-3.0, -4.0]])
    assert float(geometry.uniformity(x)) == pytest.approx(-8, abs=1e-5)
    assert float(geometry.alignment(x[:1], x[1:])) == pytest.approx(4)
    assert float(geometry.mean_cosine(x)) == pytest.approx(-1)


def test_random_directions_in_high_dimension() -> None:
    x = random(1500, 4096)
    assert float(geometry.uniformity(x)) == pytest.approx(-4, abs=0.02)
    assert float(geometry.mean_cosine(x)) == pytest.approx(0, abs=0.01)


def test_orthogonal_vectors_have_full_rank() -> None:
    x = torch.cat([torch.eye(8), -torch.eye(8)])
    assert float(geometry.rankme(x)) == pytest.approx(8)
    assert float(geometry.effective_rank(x)) == pytest.approx(8)
    assert float(geometry.pc1_share(x)) == pytest.approx(1 / 8)


def test_rank_of_known_singular_values() -> None:
    """Unit rows (1, 0) three times and (0, 1) once: singular values sqrt(3) and 1."""
    x = torch.tensor([[1.0, 0], [1, 0], [2, 0], [0, 1]])
    share = np.array([math.sqrt(3), 1.0]) / (math.sqrt(3) + 1)
    assert float(geometry.rankme(x)) == pytest.approx(math.exp(-(share * np.log(share)).sum()))
    assert float(geometry.effective_rank(x)) == pytest.approx(1), "centred: one direction is left"


@pytest.mark.parametrize("shape", [(40, 12), (12, 40), (30, 30)])
@pytest.mark.parametrize("center", [False, True])
def test_singular_values_equal_numpy(shape: tuple[int, int], center: bool) -> None:
    x = random(*shape).double()
    reference = x.numpy() - (x.numpy().mean(0) if center else 0)
    expected = np.linalg.svd(reference, compute_uv=False)
    # Centring n <= D rows leaves one value that is zero; the Gram matrix resolves it to 1e-8 of the largest.
    np.testing.assert_allclose(geometry.singular_values(x, center).numpy(), expected, atol=1e-6)


def test_uniformity_and_mean_cosine_equal_the_plain_double_loop() -> None:
    x = random(57, 6)
    u = torch.nn.functional.normalize(x.double(), dim=1)
    i, j = torch.triu_indices(57, 57, offset=1)
    squared = (u[i] - u[j]).square().sum(1)
    assert float(geometry.uniformity(x)) == pytest.approx(float(squared.mul(-2).exp().mean().log()), abs=1e-6)
    assert float(geometry.uniformity(x, t=3)) == pytest.approx(
        float(squared.mul(-3).exp().mean().log()), abs=1e-6
    )
    assert float(geometry.mean_cosine(x)) == pytest.approx(float((u[i] * u[j]).sum(1).mean()))


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_uniformity_does_not_depend_on_the_chunk(chunk: int) -> None:
    x = random(200, 5)
    assert float(geometry.uniformity(x, chunk=chunk)) == pytest.approx(
        float(geometry.uniformity(x)), abs=1e-6
    )


def test_ratios_are_one_by_chance_zero_for_equal_positives_and_invariant() -> None:
    sentences = random(400, 16)
    i, j = torch.triu_indices(400, 400, offset=1)
    x, y = sentences[i], sentences[j]  # every distinct pair as a positive: chance level exactly
    assert float(geometry.alignment_ratio(x, y, sentences)) == pytest.approx(1)
    assert float(geometry.uniformity_ratio(x, y, sentences)) == pytest.approx(1, abs=1e-5)
    assert float(geometry.alignment_ratio(sentences, sentences, sentences)) == 0
    x, y = sentences[:50], sentences[:50] + 0.5 * random(50, 16, 1)
    ratios = (
        float(geometry.alignment_ratio(x, y, sentences)),
        float(geometry.uniformity_ratio(x, y, sentences)),
    )
    assert ratios[0] < 1 < ratios[1]
    turn, scale = rotation(16), 0.1 + random(400, 1, 3).abs()
    moved = float(geometry.alignment_ratio(x @ turn, y @ turn, sentences @ turn * scale))
    assert moved == pytest.approx(ratios[0], rel=1e-5)
    moved = float(geometry.uniformity_ratio(x @ turn, y @ turn, sentences @ turn * scale))
    assert moved == pytest.approx(ratios[1], rel=1e-5)


def test_fewer_than_two_rows_are_undefined_and_zero_rows_finite() -> None:
    assert math.isnan(geometry.uniformity(random(1, 4)))
    assert math.isnan(geometry.mean_cosine(random(1, 4)))
    assert all(math.isfinite(v) for v in geometry.summary(torch.zeros(5, 4)).values())


def test_inputs_are_left_alone() -> None:
    x = random(20, 4)
    copy = x.clone()
    geometry.summary(x, x[:3], x[3:6])
    assert torch.equal(x, copy)


def test_suite_takes_the_whole_stsb(tmp_path: Path) -> None:
    encoder = HashedWords()
    scores, protocol = suite("geometry").run(encoder, {"data_dir": str(write_sts_folder(tmp_path))})
    assert set(protocol["data"]) == {"stsb_train", "stsb_dev", "stsb_test"}
    assert len(encoder.calls) == 1
    assert len(encoder.calls[0]) == len(set(encoder.calls[0]))
    x = torch.from_numpy(encoder.encode(encoder.calls[0]))
    assert scores["geometry/uniformity"] == pytest.approx(float(geometry.uniformity(x)))
    assert 0 < scores["geometry/alignment"] < 1
    assert scores["geometry/alignment_ratio"] < 1 < scores["geometry/uniformity_ratio"]
    assert any("reconstruction" in note for note in protocol["notes"])
    groups = read(protocol["cosines_by_rating"])
    assert sum(map(len, groups.values())) == protocol["data"]["stsb_test"]["pairs"]
    assert scores["geometry/separation"] == pytest.approx(separation(groups), rel=1e-2)


def test_a_nan_gives_nan_and_no_crash() -> None:
    x = random(20, 6)
    x[3, 2] = math.nan
    assert all(math.isnan(value) for value in geometry.summary(x, x, x).values())
    assert geometry.singular_values(x).isnan().all()


def test_suite_refuses_vectors_that_are_not_finite(tmp_path: Path) -> None:
    class Broken(HashedWords):
        def encode(self, sentences: Sequence[str]) -> np.ndarray:
            return np.full((len(sentences), 4), np.inf, dtype=np.float32)

    write_sts_folder(tmp_path, pairs=10)
    for name, settings in (("geometry", {"data_dir": str(tmp_path)}), ("lee", {})):
        with pytest.raises(UserError, match="vectors are not finite, the first for"):
            suite(name).run(Broken(), settings)
