"""PAWS-X: scores of hand-made vectors, and files that are broken."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from embedlab.errors import UserError
from embedlab.evaluation import suite
from embedlab.evaluation.core.files import Hub
from embedlab.evaluation.probes.pawsx import load, score
from tests.evaluation.helpers import Lookup, write_tsv
from tests.evaluation.real import needs_data

TABLE = {"x": (1.0, 0.0), "near": (1.0, 0.1), "off": (1.0, 1.0), "far": (0.0, 1.0), "opposite": (-1.0, 0.0)}


def write(folder: Path, rows: list[tuple[str, str]], language: str = "en") -> Path:
    table = [(i, label, "x", second) for i, (label, second) in enumerate(rows)]
    write_tsv(folder / f"pawsx_dev_{language}.tsv.gz", ["idx", "label", "sentence1", "sentence2"], table)
    return folder


def test_order_by_cosine_decides(tmp_path: Path) -> None:
    write(tmp_path, [("1", "near"), ("0", "off"), ("1", "far"), ("0", "opposite")])
    scores, block = suite("pawsx").run(Lookup(TABLE), {"data_dir": str(tmp_path)})
    # Ranked: paraphrase, other, paraphrase, other: precision 1 and 2/3 where a paraphrase stands.
    assert scores["pawsx-en/average_precision"] == pytest.approx(100 * (1 + 2 / 3) / 2, abs=1e-3)
    assert scores["pawsx-en/roc_auc"] == pytest.approx(75.0)
    assert block["data"]["pawsx-en"]["paraphrases"] == 2


def test_cosines_next_to_each_other_are_no_tie() -> None:
    found = score(torch.tensor([1e-9, 2e-9]), torch.tensor([0, 1]))
    assert found == {"average_precision": 100.0, "roc_auc": 100.0}


@pytest.mark.parametrize("levels", [2, 5, 10**6])
@pytest.mark.parametrize("n", [2, 3, 17, 400])
def test_both_areas_are_those_of_plain_counts(n: int, levels: int) -> None:
    """Ties by their definitions, in float64: float32 sums are off by 1e-5 of a percent."""
    generator = torch.Generator().manual_seed(n + levels)
    for _ in range(5):
        cosine = torch.randint(levels, (n,), generator=generator).double() / levels - 0.5
        labels = torch.randint(2, (n,), generator=generator)
        labels[0], labels[-1] = 0, 1
        pairs = list(zip(cosine.tolist(), labels.tolist(), strict=True))
        right, wrong = ([c for c, label in pairs if label == kind] for kind in (1, 0))
        area = sum((a > b) + (a == b) / 2 for a in right for b in wrong) / (len(right) * len(wrong))
        precision = [sum(b >= a for b in right) / sum(b >= a for b, _ in pairs) for a in right]
        found = score(cosine, labels)
        assert found["roc_auc"] == pytest.approx(100 * area, abs=1e-9)
        assert found["average_precision"] == pytest.approx(100 * sum(precision) / len(right), abs=1e-9)


def test_the_mean_over_languages(tmp_path: Path) -> None:
    write(tmp_path, [("1", "near"), ("0", "far")])
    write(tmp_path, [("0", "near"), ("1", "far")], "de")
    scores, _ = suite("pawsx").run(Lookup(TABLE), {"data_dir": str(tmp_path), "languages": ["en", "de"]})
    assert scores["pawsx/roc_auc"] == pytest.approx(50.0)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([("1", "near"), ("2", "far")], r":3: unknown label \(label=2\)"),
        ([("1", "near"), ("1", "far")], "needs paraphrases and others"),
    ],
)
def test_bad_files(tmp_path: Path, rows: list[tuple[str, str]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(write(tmp_path, rows))


def test_bad_settings(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="choose dev or test"):
        load(tmp_path, "train")
    with pytest.raises(UserError, match="sw"):
        load(tmp_path, languages=["sw"])


def test_real_files_have_the_known_share_of_paraphrases() -> None:
    pairs = load(needs_data("nli"))["en"]
    assert len(pairs.labels) > 1900
    assert 0.4 < pairs.labels.mean() < 0.5


@pytest.mark.parametrize(("split", "there"), [("dev", "validation"), ("test", "test")])
def test_the_split_on_the_hub(split: str, there: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def rows(hub: Hub, columns: Sequence[str] = ()) -> dict[str, list[Any]]:
        asked.append((hub.config, hub.split))
        return {"label": ["0", "1"], "sentence1": ["a", "b"], "sentence2": ["c", "d"]}

    monkeypatch.setattr(Hub, "rows", rows)
    assert len(load(None, split, ["en", "de"])["de"].labels) == 2
    assert sorted(asked) == [("de", there), ("en", there)]
