"""Spectra, cosines, language probe and purity on vectors whose language structure is known."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from embedlab.errors import UserError
from embedlab.evaluation import suite
from embedlab.evaluation.probes.languages import pair_cosines, probe_accuracy, purity, spectrum
from tests.evaluation.multilingual import Interlingua, write_parallel


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_spectrum_of_known_directions() -> None:
    """Four orthogonal directions and their opposites: centred at 0, a quarter of the variance each."""
    rows = torch.cat([torch.eye(4), -torch.eye(4)])
    found = spectrum(5 * rows)
    assert found["rankme"] == pytest.approx(4)
    assert found["effective_rank"] == pytest.approx(4)
    assert found["pc1_share"] == pytest.approx(0.25)
    assert found["pc10_share"] == pytest.approx(1)
    assert found["mean_cosine"] == pytest.approx(-1 / 7)
    assert spectrum(torch.ones(6, 4))["rankme"] == pytest.approx(1)


def test_cosines_of_translations_and_of_others_by_brute_force() -> None:
    vectors = draw(3, 7, 5)
    related, unrelated = pair_cosines(vectors)
    u = torch.nn.functional.normalize(vectors.double(), dim=-1)
    for a in range(3):
        for b in range(3):
            same = [float(u[a, i] @ u[b, i]) for i in range(7)]
            other = [float(u[a, i] @ u[b, j]) for i in range(7) for j in range(7) if i != j]
            assert float(related[a, b]) == pytest.approx(sum(same) / 7)
            assert float(unrelated[a, b]) == pytest.approx(sum(other) / 42)


def test_purity_of_clusters_of_mixtures_and_of_equal_rows() -> None:
    labels = torch.arange(3).repeat_interleave(20)
    centres = 50 * torch.eye(3, 8)[labels]
    assert purity(centres + draw(60, 8), labels, 5).tolist() == [1.0] * 60
    # Triples of near twins, one of each label: the two nearest rows have another label.
    twins = draw(20, 8).repeat(3, 1) + 1e-3 * draw(60, 8, seed=1)
    assert float(purity(twins, labels, 2).sum()) == 0
    assert purity(torch.ones(6, 4), torch.tensor([0, 0, 0, 0, 0, 0]), 2).tolist() == [1.0] * 6


def test_probe_finds_a_separable_language_and_nothing_in_noise() -> None:
    labels = torch.arange(4).repeat_interleave(100)
    groups = torch.arange(100).repeat(4)
    noise = draw(400, 16)
    marked = noise.clone()
    marked[torch.arange(400), labels] += 8
    assert probe_accuracy(marked, labels, groups) > 97
    assert probe_accuracy(noise, labels, groups) < 50
    with pytest.raises(UserError, match="too few sentences"):
        probe_accuracy(noise[:8], labels[:8], torch.arange(8) % 4)


def test_probe_keeps_translations_on_one_side_of_the_split() -> None:
    """Each sentence has a vector and label of its own, repeated: only leaked copies could be named."""
    groups = torch.arange(50).repeat(4)
    labels = torch.randint(0, 2, (50,), generator=torch.Generator().manual_seed(3))[groups]
    assert probe_accuracy(draw(50, 40)[groups], labels, groups) < 90


@pytest.mark.parametrize("clusters", [0.0, 4.0])
def test_the_suite_tells_an_interlingua_from_language_clusters(tmp_path: Path, clusters: float) -> None:
    write_parallel(tmp_path)
    scores, block = suite("languages").run(Interlingua(clusters), {"data_dir": tmp_path, "neighbours": 5})
    assert scores["identity/chance"] == pytest.approx(100 / 3)
    assert scores["purity/chance"] == pytest.approx(100 * 39 / 119)
    assert set(block["singular_values"]) == {"all", "eng", "deu", "fra"}
    assert len(block["cosine"]["related"]) == 3
    if clusters:
        assert scores["identity/accuracy"] > 95
        assert scores["purity/knn"] > 90
        assert scores["spectrum/pc1_share"] > 0.4
        assert scores["cosine-eng-deu/gap"] < 0.2
    else:
        assert scores["identity/accuracy"] < 60
        assert scores["purity/knn"] < 30
        assert scores["cosine-eng-deu/related"] == pytest.approx(1)
        assert scores["cosine/gap"] > 0.9
        assert scores["spectrum/pc1_share"] < 0.2
        assert scores["spectrum-deu/rankme"] == pytest.approx(scores["spectrum-fra/rankme"])


def test_figures(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    write_parallel(tmp_path)
    files = {"figure": str(tmp_path / "spectrum.png"), "map": str(tmp_path / "map.png")}
    suite("languages").run(Interlingua(), {"data_dir": tmp_path, **files})
    assert all(Path(file).read_bytes()[:4] == b"\x89PNG" for file in files.values())


def test_umap_missing_or_unknown_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    write_parallel(tmp_path)
    monkeypatch.setitem(sys.modules, "umap", None)
    settings = {"data_dir": tmp_path, "map": str(tmp_path / "m.png")}
    with pytest.raises(UserError, match=r"UMAP is not installed.*embedlab\[plot\]"):
        suite("languages").run(Interlingua(), {**settings, "projection": "umap"})
    with pytest.raises(UserError, match="projection=pca"):
        suite("languages").run(Interlingua(), {**settings, "projection": "pca"})
    with pytest.raises(UserError, match="pivot=xx"):
        suite("languages").run(Interlingua(), {"data_dir": tmp_path, "pivot": "xx"})


@pytest.mark.parametrize(("rows", "k"), [(5, 2), (9, 3), (40, 10)])
def test_purity_of_equal_rows_counts_k_others(rows: int, k: int) -> None:
    """Most rows are not among their own k + 1 nearest, and of these one is left out all the same."""
    labels = torch.arange(rows) % 2
    shares = purity(torch.ones(rows, 3), labels, k) * k
    torch.testing.assert_close(shares, shares.round())
