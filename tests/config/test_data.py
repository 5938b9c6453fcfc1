from __future__ import annotations

from typing import Any

import pytest

from embedlab.config.data import DataConfig
from embedlab.data.kinds import data_config
from embedlab.errors import UserError


@pytest.mark.parametrize(
    ("settings", "key", "says"),
    [
        ({"name": "sentence"}, "data.name", "data=sentences"),
        ({"batch_size": 0}, "data.batch_size", "at least 1"),
        ({"batch_size": True}, "data.batch_size", "a whole number"),
        ({"mega_batch": "8"}, "data.mega_batch", "a whole number"),
        ({"pack": 4}, "data.pack", "at least 8"),
        ({"limit": -1}, "data.limit", "at least 1"),
        ({"overlong": "cut"}, "data.overlong", "error, drop, truncate"),
        ({"duplicates": "maybe"}, "data.duplicates", "keep, drop"),
        ({"files": None}, "data.files", "data.package=NAME"),
        ({"files": None, "package": "nltk"}, "data.package", "gensim-wikipedia"),
        ({"files": None, "package": "emoji"}, "data.package", "data=parallel"),
        ({"columns": {"anchor": "x"}}, "data.columns.anchor", "sentence"),
        ({"columns": {"sentence": -1}}, "data.columns.sentence", "not the name or place of a column"),
        ({"pairs": ["en-de"]}, "data.pairs", "no languages"),
        ({"revision": "main"}, "data.revision", "set data.hub"),
        ({"bach_size": 3}, "data.bach_size", "data.batch_size"),
    ],
)
def test_a_bad_setting_names_its_key_and_a_way_out(settings: dict[str, Any], key: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        data_config({"files": "x.txt", **settings})
    assert caught.value.key == key
    assert says in str(caught.value)


def test_files_come_before_the_hub_and_the_hub_before_a_package() -> None:
    settings = {"files": "mine.txt", "hub": "some/set", "package": "gensim-wikipedia"}
    assert data_config(settings).source == "mine.txt"
    assert data_config({**settings, "files": None}).source == "hub:some/set"
    assert data_config({**settings, "files": None, "hub": None}).source == "package:gensim-wikipedia"


def test_a_role_without_a_column_is_left_to_the_usual_names() -> None:
    config = data_config({"name": "nli", "files": "x.csv", "columns": {"anchor": "a", "positive": None}})
    assert config.chosen == {"anchor": "a"}


def test_the_records_are_frozen() -> None:
    with pytest.raises(AttributeError):
        DataConfig(files="x.txt").batch_size = 3  # type: ignore[misc]
