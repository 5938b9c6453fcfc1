"""Data sets of the hub through a stand-in that has their columns; the hub itself when it cannot be reached."""

from __future__ import annotations

from typing import Any

import datasets
import pytest

from embedlab.errors import UserError
from embedlab.evaluation.bitext import parallel_texts
from embedlab.evaluation.core.files import Hub
from embedlab.evaluation.finetune import glue, qa_data, xnli
from embedlab.evaluation.sts import sts_multilingual

ANSWERS = [{"text": ["Rome", "in Rome"], "answer_start": [3, 0]}, {"text": ["Oslo"], "answer_start": [0]}]
QUESTIONS = {"context": ["in Rome", "Oslo it is"], "question": ["where?", "and here?"], "answers": ANSWERS}
PAIRS = {"premise": ["a", "b"], "hypothesis": ["c", "d"], "label": [0, 2]}
SETS: dict[tuple[str, str | None, str], dict[str, list[Any]]] = {
    ("facebook/xnli", "en", "train"): PAIRS,
    ("facebook/xnli", "sw", "test"): PAIRS,
    ("facebook/xnli", "en", "validation"): PAIRS,
    ("nyu-mll/glue", "cola", "train"): {"sentence": ["a", "b"], "label": [1, 0]},
    ("nyu-mll/glue", "cola", "validation"): {"sentence": ["c"], "label": [1]},
    ("nyu-mll/glue", "mnli", "train"): PAIRS,
    ("nyu-mll/glue", "mnli", "validation_matched"): PAIRS,
    ("google/xquad", "xquad.en", "validation"): QUESTIONS,
    ("google/xquad", "xquad.de", "validation"): QUESTIONS | {"question": ["wo?", "und hier?"]},
    ("facebook/mlqa", "mlqa.de.de", "test"): QUESTIONS,
    ("rajpurkar/squad", None, "train"): QUESTIONS,
    ("mteb/tatoeba-bitext-mining", "deu-eng", "test"): {"sentence1": ["ja"], "sentence2": ["yes"]},
    ("PhilipMay/stsb_multi_mt", "de", "test"): {
        "sentence1": ["a", "b"], "sentence2": ["c", "d"], "similarity_score": [1.0, 5.0]
    },
}  # fmt: skip


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, config: str | None = None, *, split: str, **more: str) -> datasets.Dataset:
        assert more in ({}, {"data_dir": more.get("data_dir"), "revision": "refs/convert/parquet"})
        return datasets.Dataset.from_dict(SETS[name, more.get("data_dir", config), split])

    monkeypatch.setattr(datasets, "load_dataset", load)


@pytest.mark.usefixtures("hub")
def test_inference_and_glue() -> None:
    test = xnli.load(None, "sw", "test")
    assert (test.first, test.second, test.labels.tolist()) == (["a", "b"], ["c", "d"], [0, 2])
    assert len(xnli.load(None, "en", "dev")) == 2
    assert len(xnli.load_training(None, None, [], 1)) == 1
    assert xnli.languages(None)[-1] == "zh"
    training, dev = glue.load("cola", {})
    assert (training.labels.tolist(), dev.first, dev.second) == ([1, 0], ["c"], None)
    assert glue.load("mnli", {})[1].second == ["c", "d"]


@pytest.mark.usefixtures("hub")
def test_questions() -> None:
    grid = qa_data.load_grid("xquad", None, ["en", "de"])
    assert set(grid) == {("en", "en"), ("en", "de"), ("de", "en"), ("de", "de")}
    assert grid["en", "de"].questions == ["wo?", "und hier?"]
    assert grid["en", "de"].answers[0] == ["Rome", "in Rome"]
    assert grid["en", "de"].gold == [0, 1]
    assert len(qa_data.load_grid("mlqa", None, ["de"], limit=1)["de", "de"]) == 1
    rows = qa_data.load_training(None).rows
    assert [row.passage[row.start : row.start + len(row.answer)] for row in rows] == ["Rome", "Oslo"]


@pytest.mark.usefixtures("hub")
def test_translations() -> None:
    (pair,) = parallel_texts.tatoeba(None, ["deu"])
    assert (pair.first, pair.second, pair.pivot) == (["ja"], ["yes"], "eng")
    found = sts_multilingual.load(None, languages=["de"])
    assert found["de"].gold.tolist() == [1.0, 5.0]
    with pytest.raises(UserError, match=r"parallel tables are local files.*ntrex"):
        parallel_texts.parallel_table(None)


@pytest.mark.usefixtures("hub")
def test_a_column_that_is_missing_is_named() -> None:
    with pytest.raises(UserError, match=r"hub:facebook/xnli: has no column 'text' \(it has premise"):
        Hub("facebook/xnli", "en", "train", "x.tsv").rows(["text"])


def test_an_unreachable_hub_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*arguments: Any, **more: Any) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(
        UserError, match=r"cannot load facebook/xnli from the hub \(no route\).*xnli_test_"
    ) as raised:
        xnli.load(None, "en", "test")
    assert "\n" not in str(raised.value)
