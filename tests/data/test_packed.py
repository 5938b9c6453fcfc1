from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from embedlab.config.data import DataConfig
from embedlab.data.build import build_token_table
from embedlab.data.kinds import data_kind
from embedlab.data.resident import ResidentTable
from embedlab.data.table import PackedTable
from embedlab.encoders.tokenization import Tokenization
from embedlab.errors import UserError
from tests.support import SENTENCES, tiny_tokenizer


def packed_rows(table: PackedTable) -> list[list[int]]:
    rows = torch.arange(table.n_rows)
    (name,) = table.fields
    batch = ResidentTable(table, "cpu").gather(rows, {name: table.length})[name]
    assert batch["attention_mask"].all()
    return batch["input_ids"].tolist()


def pack(path: Path, tokenizer: Any, length: int, **settings: Any) -> PackedTable:
    config = DataConfig(files=str(path), pack=length, **settings)
    fields = {"sentence": ("sentence", Tokenization(tokenizer, None, 24))}
    return PackedTable(build_token_table(config, fields), length)


def whole(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(("model", "first", "last"), [("bert", "[CLS]", "[SEP]"), ("roberta", "<s>", "</s>")])
def test_encoders_read_framed_pieces_of_one_stream(
    sentences: Path, model: str, first: str, last: str
) -> None:
    tokenizer = tiny_tokenizer(model)
    one, end = tokenizer.convert_tokens_to_ids([first, last])
    stream = [token for row in whole(tokenizer, list(SENTENCES)) for token in [*row, end]]
    rows = packed_rows(pack(sentences, tokenizer, 20))
    assert len(rows) == len(stream) // 18
    assert rows == [[one, *stream[i * 18 : (i + 1) * 18], end] for i in range(len(rows))]


@pytest.mark.parametrize("model", ["gpt2", "llama", "opt"])
def test_decoders_read_the_bare_stream(sentences: Path, model: str) -> None:
    tokenizer = tiny_tokenizer(model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    end = tokenizer.eos_token_id
    stream = [token for row in whole(tokenizer, list(SENTENCES)) for token in [*row, end]]
    rows = packed_rows(pack(sentences, tokenizer, 20))
    assert rows == [stream[i * 20 : (i + 1) * 20] for i in range(len(stream) // 20)]


def test_long_texts_are_not_cut(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer("bert", max_length=64)
    text = " ".join(SENTENCES)
    (tmp_path / "a.txt").write_text(text + "\n\n" + text + "\n")
    table = pack(tmp_path / "a.txt", tokenizer, 12)
    (ids,) = whole(tokenizer, [text])
    assert len(table.fields["sentence"].ids) == 2 * (len(ids) + 1)
    assert table.report["fields"]["sentence"]["truncated"] is None
    assert table.report["dropped"] == {"empty": 1}


def test_rows_say_where_their_text_began(sentences: Path) -> None:
    table = pack(sentences, tiny_tokenizer("bert"), 12)
    offsets = table.table.fields["sentence"].offsets
    row = next(i for i in range(table.n_rows) if offsets[3] <= i * table.width < offsets[4])
    assert table.describe([0, row]) == f"{sentences}:1, {sentences}:4"


def test_too_little_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A plane.\n")
    with pytest.raises(UserError, match="less text than one packed sequence"):
        pack(tmp_path / "a.txt", tiny_tokenizer("bert"), 64)


def test_pairs_cannot_be_packed(tmp_path: Path, tokenization: Tokenization) -> None:
    (tmp_path / "a.tsv").write_text("sent0\tsent1\thard_neg\na\tb\tc\n")
    config = DataConfig(name="nli", files=str(tmp_path / "a.tsv"), pack=8)
    fields = {role: (role, tokenization) for role in data_kind(config.name).roles}
    with pytest.raises(UserError, match="one text a row can be packed"):
        PackedTable(build_token_table(config, fields), 8)
