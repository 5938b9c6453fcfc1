from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from embedlab.config.data import DataConfig
from embedlab.data.rows import read_rows
from embedlab.errors import UserError

FOUR = "en\tde\tfr\tzh-CN\n" + "".join(f"en{i}\tde{i}\tfr{i}\tzh{i}\n" for i in range(40))


@pytest.fixture
def four(tmp_path: Path) -> Path:
    path = tmp_path / "four.tsv"
    path.write_text(FOUR)
    return path


def pairs_of(files: Path | str, **settings: Any) -> list[tuple[str, str, str]]:
    stream = read_rows(DataConfig(name="parallel", files=str(files), **settings))
    return [(stream.groups[group], *texts) for _, _, texts, group in stream]  # type: ignore[misc]


def test_english_with_every_other_column(four: Path) -> None:
    pairs = pairs_of(four)
    assert pairs[:3] == [("en-de", "en0", "de0"), ("en-fr", "en0", "fr0"), ("en-zh-CN", "en0", "zh0")]
    assert len(pairs) == 120


def test_chosen_languages_and_pivot(four: Path) -> None:
    assert {pair for pair, _, _ in pairs_of(four, languages=["en", "fr"])} == {"en-fr"}
    assert {pair for pair, _, _ in pairs_of(four, languages=["de", "fr"])} == {"de-fr"}
    found = pairs_of(four, languages=["de", "fr"], pivot="zh-CN")
    assert {pair for pair, _, _ in found} == {"zh-CN-de", "zh-CN-fr"}
    assert found[0] == ("zh-CN-de", "zh0", "de0")


def test_named_pairs_with_hyphens_in_languages(four: Path) -> None:
    found = pairs_of(four, pairs=["fr-zh-CN", "de-en"])
    assert found[:2] == [("fr-zh-CN", "fr0", "zh0"), ("de-en", "de0", "en0")]


@pytest.mark.parametrize(
    ("settings", "key", "says"),
    [
        ({"languages": ["en", "xx"]}, "data.languages", "unknown language (data.languages=xx)"),
        ({"pivot": "ru"}, "data.pivot", "one of en, de, fr, zh-CN"),
        ({"pairs": ["en-xx"]}, "data.pairs", "A-B of en, de, fr, zh-CN"),
        ({"pairs": ["en"]}, "data.pairs", "unknown language pair"),
        ({"languages": ["fr"]}, "data.languages", "no table has two"),
    ],
)
def test_unknown_languages(four: Path, settings: dict[str, Any], key: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        pairs_of(four, **settings)
    assert caught.value.key == key
    assert says in str(caught.value)


def test_tables_of_different_languages(tmp_path: Path) -> None:
    for code in ("hau", "swa"):
        (tmp_path / f"en-{code}.tsv").write_text(f"{code}\ten\n{code}0\ten0\n")
    assert pairs_of(tmp_path / "*.tsv") == [("en-hau", "en0", "hau0"), ("en-swa", "en0", "swa0")]
    assert pairs_of(tmp_path / "*.tsv", languages=["en", "swa"]) == [("en-swa", "en0", "swa0")]
    with pytest.raises(UserError, match="no table has both languages"):
        pairs_of(tmp_path / "*.tsv", pairs=["hau-swa"])


def test_tables_without_a_common_language_need_a_pivot(tmp_path: Path) -> None:
    (tmp_path / "1.tsv").write_text("de\tfr\nx\ty\n")
    (tmp_path / "2.tsv").write_text("it\tes\nx\ty\n")
    with pytest.raises(UserError, match="no language is in every table") as caught:
        pairs_of(tmp_path / "*.tsv")
    assert caught.value.key == "data.pivot"
    assert {p for p, _, _ in pairs_of(tmp_path / "*.tsv", pairs=["de-fr", "es-it"])} == {"de-fr", "es-it"}


def test_source_and_target_columns(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("english\tnon_english\nhello\thallo\n")
    assert pairs_of(tmp_path / "a.tsv") == [("english-non_english", "hello", "hallo")]
    (tmp_path / "b.tsv").write_text("left\tright\nhello\thallo\n")
    named = pairs_of(tmp_path / "b.tsv", columns={"source": "right", "target": "left"})
    assert named == [("right-left", "hallo", "hello")]


def test_nested_translations(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"translation": {"en": "hello", "de": "hallo"}}\n')
    assert pairs_of(tmp_path / "a.jsonl") == [("en-de", "hello", "hallo")]


def test_the_first_rows_of_each_pair(four: Path) -> None:
    found = pairs_of(four, pair_limit=2, pair_sample="first", languages=["en", "de", "fr"])
    assert found == [
        ("en-de", "en0", "de0"),
        ("en-fr", "en0", "fr0"),
        ("en-de", "en1", "de1"),
        ("en-fr", "en1", "fr1"),
    ]


def test_a_seeded_sample_of_each_pair_in_file_order(four: Path) -> None:
    settings = {"pair_limit": 10, "languages": ["en", "de", "fr"]}
    found = pairs_of(four, **settings)
    assert found == pairs_of(four, **settings)
    for name in ("en-de", "en-fr"):
        numbers = [int(text[2:]) for pair, text, _ in found if pair == name]
        assert len(numbers) == 10
        assert numbers == sorted(set(numbers))
        assert numbers != list(range(10))


def test_the_sample_is_fair(tmp_path: Path) -> None:
    path = tmp_path / "many.tsv"
    path.write_text("en\tde\n" + "".join(f"{i}\tx\n" for i in range(4000)))
    kept = [int(text) for _, text, _ in pairs_of(path, pair_limit=2000)]
    # mean of 2,000 of 0 .. 3999 drawn without replacement: 1999.5 with a standard error of 18.3
    assert abs(sum(kept) / 2000 - 1999.5) < 4 * 18.3


def test_drops_are_counted_by_pair(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("en\tde\tfr\na\tb\t\nc\t\td\ne\tf\tg\n")
    stream = read_rows(DataConfig(name="parallel", files=str(path)))
    assert len(list(stream)) == 4
    assert stream.dropped_by_group == {("en-de", "empty"): 1, ("en-fr", "empty"): 1}


def test_the_seed_of_the_sample(four: Path) -> None:
    settings = {"pair_limit": 10, "languages": ["en", "de"]}
    assert pairs_of(four, **settings) == pairs_of(four, pair_seed=42, **settings)
    assert pairs_of(four, **settings) != pairs_of(four, pair_seed=43, **settings)
    with pytest.raises(UserError) as caught:
        pairs_of(four, pair_seed=-1)
    assert caught.value.key == "data.pair_seed"


def test_the_languages_of_a_pair(tmp_path: Path) -> None:
    def languages(text: str, name: str, **settings: Any) -> list[tuple[str, str]]:
        (tmp_path / name).write_text(text)
        return read_rows(DataConfig(name="parallel", files=str(tmp_path / name), **settings)).languages

    assert languages("en\tzh-CN\nx\ty\n", "a.tsv") == [("en", "zh-CN")]
    assert languages('{"translation": {"en": "x", "de": "y"}}\n', "a.jsonl") == [("en", "de")]
    # Columns that name the roles say no language; a hub configuration such as en-de would.
    assert languages("english\tnon_english\nx\ty\n", "b.tsv") == [("english", "non_english")]
