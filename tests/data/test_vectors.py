"""Vectors of a data set: those of the encoder in the order of the table, computed once, and never of other texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import embedlab
from embedlab.config.data import DataConfig
from embedlab.data import vectors
from embedlab.data.build import build_token_table
from embedlab.data.table import TokenTable
from embedlab.data.vectors import text_vectors
from embedlab.encoders.base import Encoder
from embedlab.encoders.tokenization import Tokenization
from embedlab.errors import UserError
from tests.support import SENTENCES

TEXTS = [*SENTENCES, SENTENCES[3], "  ", SENTENCES[0].upper()]
KEPT = [text for text in TEXTS if text.strip()]


@pytest.fixture
def teacher(tiny: Callable[..., Path]) -> Encoder:
    return embedlab.load(tiny("roberta", seed=1))


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    return DataConfig(files=str(file), cache_dir=str(tmp_path / "cache"))


@pytest.fixture
def table(config: DataConfig, tiny: Callable[..., Path]) -> TokenTable:
    words = Tokenization(embedlab.load(tiny("bert")).tokenizer, max_length=16)
    return build_token_table(config, {"sentence": ("sentence", words)}, progress=False)


def test_vectors_are_the_encoders_to_half_precision(
    config: DataConfig, table: TokenTable, teacher: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vectors, "_AT_ONCE", 5)  # several blocks
    found = text_vectors(teacher, config, table, "sentence", "cpu")
    assert found.dtype == np.float16
    assert isinstance(found, np.memmap)
    np.testing.assert_allclose(found, teacher.encode(KEPT), rtol=1e-3, atol=1e-4)


def test_they_are_computed_once_for_these_weights_and_this_text(
    config: DataConfig, table: TokenTable, teacher: Encoder, tiny: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    first = text_vectors(teacher, config, table, "sentence", "cpu")
    other = text_vectors(embedlab.load(tiny("roberta", seed=2)), config, table, "sentence", "cpu")
    assert not np.allclose(first, other, atol=1e-2)

    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr(type(teacher), "encode", refuse)
    again = text_vectors(teacher, config, table, "sentence", "cpu")
    np.testing.assert_array_equal(again, first)


@pytest.mark.parametrize("damage", ["cut", "empty", "other", "gone"])
def test_damaged_ones_are_computed_anew(
    config: DataConfig, table: TokenTable, teacher: Encoder, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = np.array(text_vectors(teacher, config, table, "sentence", "cpu"))
    (file,) = Path(str(config.cache_dir)).glob("*/vectors.npy")
    if damage == "gone":
        file.unlink()
    elif damage == "other":
        np.save(file, np.zeros((2, 3), np.float16))
    else:
        file.write_bytes(file.read_bytes()[: -9 if damage == "cut" else 0])
    np.testing.assert_array_equal(text_vectors(teacher, config, table, "sentence", "cpu"), first)
    assert "The vector cache is built anew" in caplog.text


@pytest.mark.parametrize(
    "change", [lambda t: [*t[:4], "Another one.", *t[5:]], lambda t: t[:-1], lambda t: [*t, "More."]]
)
def test_texts_that_changed_meanwhile_are_refused(
    config: DataConfig, table: TokenTable, teacher: Encoder, change: Callable[[list[str]], list[str]]
) -> None:
    Path(str(config.files)).write_text("\n".join(change(TEXTS)) + "\n", encoding="utf-8")
    with pytest.raises(UserError, match="has changed since it was tokenised"):
        text_vectors(teacher, config, table, "sentence", "cpu")
    assert not list(Path(str(config.cache_dir)).glob("*/vectors.npy")), "nothing is left behind"


def test_a_vector_past_half_precision_is_an_error(
    config: DataConfig, table: TokenTable, teacher: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        type(teacher), "encode", lambda self, texts, **k: np.full((len(texts), self.dim), 1e6)
    )
    with pytest.raises(UserError, match=r"half precision.*method\.cached=false"):
        text_vectors(teacher, config, table, "sentence", "cpu")
