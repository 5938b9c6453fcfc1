"""Accuracy@1 of translations against cases that can be counted by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from embedlab.errors import UserError
from embedlab.evaluation import suite
from embedlab.evaluation.bitext import bitext
from embedlab.evaluation.bitext.bitext import bitext_accuracy
from embedlab.evaluation.bitext.parallel_texts import XTREME, parallel_table, tatoeba
from tests.evaluation.helpers import Constant
from tests.evaluation.multilingual import Interlingua, write_parallel
from tests.evaluation.real import needs_data


def test_an_identity_is_found_whole_and_a_rotation_of_rows_not_at_all() -> None:
    x = torch.randn(50, 16, generator=torch.Generator().manual_seed(0))
    assert bitext_accuracy(x, 3.0 * x) == {"forward": 100.0, "backward": 100.0, "mean": 100.0}
    assert bitext_accuracy(x, x.roll(1, dims=0)) == {"forward": 0.0, "backward": 0.0, "mean": 0.0}


def test_directions_are_told_apart() -> None:
    """Both sources are nearest to target 0; each target is nearest to its own source."""
    source = torch.tensor([[1.0, 0.0], [0.8, 0.6]])
    target = torch.tensor([[1.0, 0.1], [-0.1, 1.0]])
    assert bitext_accuracy(source, target) == {"forward": 50.0, "backward": 100.0, "mean": 75.0}
    assert bitext_accuracy(target, source) == {"forward": 100.0, "backward": 50.0, "mean": 75.0}


def test_a_collapsed_encoder_scores_chance() -> None:
    assert bitext_accuracy(torch.ones(20, 4), torch.ones(20, 4))["mean"] == 5.0
    assert bitext_accuracy(torch.zeros(20, 4), torch.zeros(20, 4))["mean"] == 5.0


@pytest.mark.parametrize(("gap", "first_wins"), [(3e-7, True), (3e-6, False)])
def test_cosines_that_differ_by_rounding_are_equal(gap: float, first_wins: bool) -> None:
    """The second source's own target is nearer by `gap` than the first one, a millionth being no difference."""
    angle = math.acos(1 - gap)
    source = torch.tensor([[math.cos(2 * angle), math.sin(2 * angle)], [1.0, 0.0]])
    target = torch.tensor([[math.cos(angle), math.sin(angle)], [1.0, 0.0]])
    assert bitext_accuracy(source, target)["forward"] == (50 if first_wins else 100)


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(37, 8, generator=generator)
    y = x + 0.7 * torch.randn(37, 8, generator=generator)
    whole = bitext_accuracy(x.numpy(), y.numpy())
    assert 0 < whole["mean"] < 100
    monkeypatch.setattr(bitext, "_SCORES_AT_ONCE", 100)
    assert bitext_accuracy(x, y) == whole


def test_uneven_sides_are_refused() -> None:
    with pytest.raises(ValueError, match=r"source \(3, 2\) and target \(4, 2\)"):
        bitext_accuracy(torch.ones(3, 2), torch.ones(4, 2))
    with pytest.raises(ValueError, match="n > 0"):
        bitext_accuracy(torch.ones(0, 2), torch.ones(0, 2))


def test_the_suite_scores_an_interlingua_100_and_averages_over_languages(tmp_path: Path) -> None:
    write_parallel(tmp_path / "parallel")
    scores, block = suite("bitext").run(Interlingua(), {"data_dir": str(tmp_path)})
    tasks = [
        "tatoeba",
        "tatoeba36",
        "tatoeba-deu",
        "tatoeba-fra",
        "tatoeba-nds",
        "ntrex",
        "ntrex-deu",
        "ntrex-fra",
    ]
    assert sorted({key.split("/")[0] for key in scores}) == sorted(tasks)
    assert set(scores.values()) == {100.0}
    assert block["data"]["tatoeba"]["pairs"] == {"deu": 20, "fra": 20, "nds": 20}
    assert block["notes"] == ["tatoeba36: 2 of XTREME's 36 languages"]


def test_the_mean_is_over_languages_and_candidates_are_the_other_language(tmp_path: Path) -> None:
    """French is collapsed (each sentence finds the first: 1 of 20); German is right."""
    write_parallel(tmp_path)

    class Half(Interlingua):
        def encode(self, sentences):  # type: ignore[no-untyped-def]
            vectors = super().encode(sentences)
            vectors[[text.startswith("fra") for text in sentences]] = 1.0
            return vectors

    scores, _ = suite("bitext").run(
        Half(), {"data_dir": tmp_path, "tasks": "tatoeba", "languages": "deu,fra"}
    )
    assert scores["tatoeba-deu/mean"] == 100
    assert scores["tatoeba-fra/forward"] == 5
    assert scores["tatoeba-fra/backward"] == 5
    assert scores["tatoeba/mean"] == scores["tatoeba36/mean"] == 52.5


def test_a_limit_is_said(tmp_path: Path) -> None:
    write_parallel(tmp_path)
    scores, block = suite("bitext").run(Constant(), {"data_dir": tmp_path, "limit": 4, "languages": ["deu"]})
    assert scores["tatoeba-deu/mean"] == scores["ntrex-deu/mean"] == 25
    assert "limit=4" in block["warnings"][0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tasks": "bucc"}, "tasks=bucc"),
        ({"languages": "xxx"}, r"languages=xxx.*deu, fra, nds"),
        ({"limit": 0}, "limit=0"),
        ({"data_dir": "/nowhere"}, "/nowhere: no such folder"),
    ],
)
def test_bad_settings(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    write_parallel(tmp_path)
    with pytest.raises(UserError, match=message):
        suite("bitext").run(Interlingua(), {"data_dir": tmp_path, **settings})


def test_a_folder_without_the_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no tatoeba_\*-eng"):
        suite("bitext").run(Interlingua(), {"data_dir": tmp_path})


def test_real_files_are_read_whole() -> None:
    pairs = tatoeba(needs_data("parallel"))
    assert len(pairs) == 76
    assert sum(len(p) for p in pairs) == 57598
    assert len({p.language for p in pairs} & set(XTREME)) == 36
    table = parallel_table(needs_data("parallel"))
    assert (len(table), len(table.languages)) == (1997, 31)
