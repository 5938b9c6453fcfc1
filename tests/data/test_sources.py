from __future__ import annotations

import importlib.metadata
from dataclasses import replace
from pathlib import Path

import datasets
import pytest

from embedlab.config.data import DataConfig
from embedlab.data.packages import EMOJI_LANGUAGES
from embedlab.data.rows import read_rows
from embedlab.data.sources import check_source
from embedlab.errors import UserError


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A local folder, which `datasets` reads as it reads a repository of the hub."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.csv").write_text("text,n\nfirst,1\nsecond,2\n")
    (folder / "other.csv").write_text("text,n\nother,1\n")
    return folder


def test_a_hub_data_set(dataset: Path) -> None:
    config = DataConfig(hub=str(dataset), hub_files="train.csv")
    stream = read_rows(config)
    assert [(row[1], row[2]) for row in stream] == [(1, ("first",)), (2, ("second",))]
    other = read_rows(DataConfig(hub=str(dataset), hub_files="other.csv"))
    assert other.readers[0].identity() != stream.readers[0].identity()
    assert read_rows(config).readers[0].identity() == stream.readers[0].identity()


def test_files_beside_a_source_are_read_after_it(dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text("third\nfourth\n")
    hub = DataConfig(hub=str(dataset), hub_files="train.csv")
    both = read_rows(replace(hub, also=str(tmp_path / "more.txt")))
    assert [row[2] for row in both] == [("first",), ("second",), ("third",), ("fourth",)]
    assert [row[0] for row in both] == [0, 0, 1, 1]
    assert [r.identity() for r in both.readers][:1] == [r.identity() for r in read_rows(hub).readers]
    assert len(both.readers) == 2
    with pytest.raises(UserError, match="no such file") as caught:
        check_source(replace(hub, also="nowhere.txt"))
    assert caught.value.key == "data.also"


def test_a_hub_data_set_lists_its_columns(dataset: Path) -> None:
    config = DataConfig(hub=str(dataset), hub_files="train.csv", columns={"sentence": "txt"})
    with pytest.raises(UserError, match=r"no column txt for the sentence; there are: text, n"):
        read_rows(config)


def test_class_labels_of_the_hub_are_read_as_names(dataset: Path) -> None:
    labels = datasets.ClassLabel(names=["entailment", "neutral", "contradiction"])
    features = datasets.Features(
        {"premise": datasets.Value("string"), "hypothesis": datasets.Value("string"), "label": labels}
    )
    rows = {"premise": ["p", "p", "p"], "hypothesis": ["e", "x", "c"], "label": [0, -1, 2]}
    folder = dataset.parent / "nli"
    (folder / "data").mkdir(parents=True)
    datasets.Dataset.from_dict(rows, features).to_parquet(folder / "data" / "train-0.parquet")
    stream = read_rows(DataConfig(name="nli", hub=str(folder)))
    assert [row[2] for row in stream] == [("p", "e", "c")]
    assert stream.dropped == {"no gold label": 1}


def test_a_wrong_hub_name_offline_is_one_line() -> None:
    with pytest.raises(UserError) as caught:
        read_rows(DataConfig(hub="nobody/no-such-set", hub_config="en-de"))
    line = str(caught.value)
    assert "\n" not in line
    assert "(en-de split train)" in line
    assert "data.hub=nobody/no-such-set" in line
    assert "data.files=PATH" in line


def test_a_split_that_is_not_there(dataset: Path) -> None:
    with pytest.raises(UserError, match="split"):
        read_rows(DataConfig(hub=str(dataset), hub_files="train.csv", split="dev"))


def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(UserError, match=r'Fix: pip install "embedlab\[quickstart\]"'):
        read_rows(DataConfig(package="gensim-lee"))


def test_lee_documents_as_sentences() -> None:
    pytest.importorskip("gensim")
    texts = [row[2][0] for row in read_rows(DataConfig(package="gensim-lee"))]
    assert 2_500 < len(texts) < 3_000
    assert texts[0].startswith("Hundreds of people have been forced to vacate their homes")
    assert texts[0].endswith("towards the town of Hill Top.")


def test_the_beginning_of_the_wikipedia_extract() -> None:
    pytest.importorskip("gensim")
    texts = [row[2][0] for row in read_rows(DataConfig(package="gensim-wikipedia", limit=300))]
    assert len(texts) == 300
    assert texts[0].startswith("Anarchism is a political philosophy that advocates self-governed societies")
    assert all(30 <= len(text) <= 500 and "[[" not in text and "{{" not in text for text in texts)


@pytest.mark.slow
def test_the_whole_wikipedia_extract() -> None:
    pytest.importorskip("gensim")
    texts = [row[2][0] for row in read_rows(DataConfig(package="gensim-wikipedia"))]
    assert 17_000 < len(texts) < 18_500
    assert len(set(texts)) / len(texts) > 0.99


def test_emoji_names_in_fourteen_languages() -> None:
    pytest.importorskip("emoji")
    stream = read_rows(DataConfig(name="parallel", package="emoji"))
    rows = list(stream)
    assert stream.groups == [f"en-{code}" for code in EMOJI_LANGUAGES[1:]]
    assert len(rows) > 13 * 1_900
    german = {texts for _, _, texts, group in rows if stream.groups[group] == "en-de"}
    assert ("shopping bags", "einkaufstüten") in german
    assert not any(":" in text[0] + text[-1] or "_" in text for pair in german for text in pair)


def test_an_eighth_of_the_emoji_is_held_out_with_all_its_variants() -> None:
    pytest.importorskip("emoji")
    from embedlab.data.packages import emoji_names, is_held_out

    german = EMOJI_LANGUAGES.index("de")
    every = [names[0] for names in emoji_names() if names[german]]
    kept = [
        texts[0]
        for _, _, texts, _ in read_rows(DataConfig(name="parallel", package="emoji-train", pairs=["en-de"]))
    ]
    held = [name for name in every if is_held_out(name)]
    assert sorted(kept + held) == sorted(every)
    assert 0.08 < len(held) / len(every) < 0.16
    assert is_held_out("man teacher") == is_held_out("woman teacher") == is_held_out("teacher")
    phrases = {texts[0] for _, _, texts, _ in read_rows(DataConfig(package="emoji-phrases"))}
    assert len(phrases) > 13 * len(kept) * 0.8
    assert set(kept) <= phrases
