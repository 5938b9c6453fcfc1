"""Multilingual STS-B: monolingual and cross-lingual pairs of hand-made vectors."""

from __future__ import annotations

from pathlib import Path

import pytest

from embedlab.errors import UserError
from embedlab.evaluation import suite
from embedlab.evaluation.sts.sts_multilingual import load
from tests.evaluation.helpers import Lookup, write_tsv
from tests.evaluation.real import needs_data

# Three pairs rated 1, 3, 5. English agrees with the ratings, German is the wrong way round.
TABLE = {
    "a1": (1.0, 0.0), "a2": (0.0, 1.0), "b1": (1.0, 0.0), "b2": (1.0, 1.0), "c1": (1.0, 0.0), "c2": (1.0, 0.1),
    "ä1": (1.0, 0.0), "ä2": (1.0, 0.1), "ß1": (1.0, 0.0), "ß2": (1.0, 1.0), "ç1": (1.0, 0.0), "ç2": (0.0, 1.0),
}  # fmt: skip


def write(folder: Path, second: str = "5") -> Path:
    header = ["idx", "score", "sentence1", "sentence2"]
    (folder / "sts").mkdir(parents=True)
    (folder / "sts_multilingual").mkdir()
    english = [(0, 1, "a1", "a2"), (1, 3, "b1", "b2"), (2, 5, "c1", "c2")]
    german = [(0, 1, "ä1", "ä2"), (1, 3, "ß1", "ß2"), (2, second, "ç1", "ç2")]
    write_tsv(folder / "sts" / "stsb_test.tsv.gz", header, english)
    write_tsv(folder / "sts_multilingual" / "stsb_mt_de_test.tsv.gz", header, german)
    return folder


def test_both_kinds_of_pairs(tmp_path: Path) -> None:
    write(tmp_path)
    for place in (tmp_path, tmp_path / "sts_multilingual"):
        scores, block = suite("sts_multilingual").run(Lookup(TABLE), {"data_dir": str(place)})
        assert scores["stsb-en/spearman"] == pytest.approx(100)
        assert scores["stsb-de/spearman"] == pytest.approx(-100)
        # English first sentences are all (1, 0), so German second ones decide.
        assert scores["stsb-en-de/spearman"] == pytest.approx(-100)
        assert scores["stsb-monolingual/spearman"] == scores["stsb-de/spearman"]
        assert scores["stsb-crosslingual/pearson"] == scores["stsb-en-de/pearson"]
        assert any("1379" in warning for warning in block["warnings"])
    _, block = suite("sts_multilingual").run(Lookup(TABLE), {"data_dir": str(tmp_path), "limit": 2})
    (warning,) = block["warnings"]
    assert warning.startswith("limit=2")


def test_without_english_there_is_no_cross_lingual_score(tmp_path: Path) -> None:
    scores, _ = suite("sts_multilingual").run(
        Lookup(TABLE), {"data_dir": write(tmp_path), "languages": ["de"]}
    )
    assert {key.split("/")[0] for key in scores} == {"stsb-de", "stsb-monolingual"}


def test_bad_files(tmp_path: Path) -> None:
    write(tmp_path, second="five")
    with pytest.raises(UserError, match="rating is not a number"):
        load(tmp_path)
    with pytest.raises(UserError, match="has no stsb_mt_"):
        load(tmp_path, "dev")
    with pytest.raises(UserError, match="split=train"):
        load(tmp_path, "train")


def test_real_files() -> None:
    found = load(needs_data("sts_multilingual"), limit=50)
    assert set(found) == {"en", "de", "es", "fr", "it", "nl", "pl", "pt", "ru", "zh"}
    assert all((pairs.gold == found["en"].gold).mean() > 0.95 for pairs in found.values())
