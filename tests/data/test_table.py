"""A damaged token table is no table: it is built anew, with a notice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from embedlab.config.data import DataConfig
from embedlab.data.build import build_token_table
from embedlab.data.table import DamagedTable, TokenTable
from embedlab.encoders.tokenization import Tokenization


def build(sentences: Path, tokenization: Tokenization) -> TokenTable:
    config = DataConfig(files=str(sentences), report=False)
    return build_token_table(config, {"sentence": ("sentence", tokenization)}, progress=False)


@pytest.mark.parametrize(
    "change",
    [
        None,
        [],
        {"format": "3"},
        {"n_rows": -1},
        {"n_rows": 1 << 60},
        {"fields": []},
        {"fields": {"sentence": 3}},
        {"fields": {"sentence": {"role": "sentence", "dtype": "O", "pad_id": 0, "tokens": 1}}},
        {"numbers": {"../x": "O"}},
        {"report": {}},
        {"report": {"content": 3}},
        {"digest": "0"},
    ],
)
def test_the_description_is_damaged(
    change: Any, sentences: Path, tokenization: Tokenization, caplog: pytest.LogCaptureFixture
) -> None:
    table = build(sentences, tokenization)
    path = table.folder / "meta.json"
    good = path.read_text()
    path.write_text(json.dumps(json.loads(good) | change if isinstance(change, dict) else change))
    with pytest.raises(DamagedTable):
        TokenTable.open(table.folder)
    again = build(sentences, tokenization)
    assert "The token cache is built anew" in caplog.text
    assert (again.n_rows, again.report["content"]) == (table.n_rows, table.report["content"])


@pytest.mark.parametrize(
    ("name", "place"), [("offsets0.i8", 0), ("offsets0.i8", 9), ("offsets0.i8", -1), ("table.i4", 3)]
)
def test_places_that_are_not_there(
    name: str, place: int, sentences: Path, tokenization: Tokenization
) -> None:
    table = build(sentences, tokenization)
    content = bytearray((table.folder / name).read_bytes())
    content[place] ^= 0x80
    (table.folder / name).write_bytes(content)
    with pytest.raises(DamagedTable):
        TokenTable.open(table.folder)
