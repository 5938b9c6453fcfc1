"""Vectors of a data set: those of the encoder in the order of the table, computed once, and never of other texts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize("damage", ["cut", "empty", "other", "gone", "zeros", "a bit", "no sum", "no number"])
def test_damaged_ones_are_computed_anew(
    config: DataConfig, table: TokenTable, teacher: Encoder, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = np.array(text_vectors(teacher, config, table, "sentence", "cpu"))
    (file,) = Path(str(config.cache_dir)).glob("*/vectors.npy")
    if damage == "gone":
        file.unlink()
    elif damage == "other":
        np.save(file, np.zeros((2, 3), np.float16))
    elif damage in ("zeros", "a bit"):
        held = np.load(file, mmap_mode="r+").view(np.uint16)
        held[3] = 0 if damage == "zeros" else held[3] ^ 1
        held.flush()
    elif damage == "no sum":
        file.with_name("vectors.crc32").unlink()
    elif damage == "no number":
        file.with_name("vectors.crc32").write_bytes(b"\xff")
    else:
        file.write_bytes(file.read_bytes()[: -9 if damage == "cut" else 0])
    np.testing.assert_array_equal(text_vectors(teacher, config, table, "sentence", "cpu"), first)
    assert "The vector cache is built anew" in caplog.text


@pytest.mark.parametrize("damaged", [False, True])
def test_a_killed_run_leaves_its_blocks_to_the_next(
    config: DataConfig, table: TokenTable, teacher: Encoder, damaged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vectors, "_AT_ONCE", 5)
    encode = type(teacher).encode
    asked: list[list[str]] = []

    def stopped(self: Encoder, texts: list[str], **options: Any) -> np.ndarray:
        if len(asked) == 3:
            raise KeyboardInterrupt
        asked.append(texts)
        return encode(self, texts, **options)

    monkeypatch.setattr(type(teacher), "encode", stopped)
    with pytest.raises(KeyboardInterrupt):
        text_vectors(teacher, config, table, "sentence", "cpu")
    if damaged:
        file = sorted(Path(str(config.cache_dir)).glob("*/vectors.npy"))[0]
        file.write_bytes(file.read_bytes()[:-2])
    asked.insert(0, [])  # 4 of them: none is refused any more
    found = text_vectors(teacher, config, table, "sentence", "cpu")
    assert sum(map(len, asked)) == len(KEPT) + (5 if damaged else 0)
    np.testing.assert_allclose(found, encode(teacher, KEPT), rtol=1e-3, atol=1e-4)
    (whole,) = Path(str(config.cache_dir)).glob("*/vectors.npy")
    assert not list(whole.parent.parent.glob(f"{whole.parent.name}-*"))


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


@pytest.mark.parametrize(
    ("value", "told"),
    [(1e6, "half precision"), (1e-6, "half precision"), (np.inf, "not finite"), (np.nan, "not finite")],
)
def test_a_vector_that_cannot_be_kept_is_an_error_of_its_row(
    config: DataConfig, table: TokenTable, teacher: Encoder, value: float, told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def encode(self: Encoder, texts: list[str], **options: object) -> np.ndarray:
        vectors = np.ones((len(texts), self.dim), np.float32)
        vectors[[text == SENTENCES[4] for text in texts]] = value
        return vectors

    monkeypatch.setattr(vectors, "_AT_ONCE", 3)
    monkeypatch.setattr(type(teacher), "encode", encode)
    with pytest.raises(UserError, match=rf"texts\.txt:5: .*{told}") as caught:
        text_vectors(teacher, config, table, "sentence", "cpu")
    assert ("method.cached=false" in str(caught.value)) == (told == "half precision")


def test_a_vector_of_zeros_is_kept(
    config: DataConfig, table: TokenTable, teacher: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        type(teacher), "encode", lambda self, texts, **k: np.zeros((len(texts), self.dim), np.float32)
    )
    assert not text_vectors(teacher, config, table, "sentence", "cpu").any()


@pytest.mark.parametrize(
    "change", [{"hidden_act": "relu"}, {"num_attention_heads": 2}, {"layer_norm_eps": 0.1}], ids=str
)
def test_a_model_that_computes_otherwise_with_the_same_weights_is_another_teacher(
    config: DataConfig, table: TokenTable, tiny: Callable[..., Path], tmp_path: Path, change: dict[str, Any]
) -> None:
    folder = tmp_path / "other"
    shutil.copytree(tiny("bert", seed=1), folder)
    before = embedlab.load(folder)
    first = text_vectors(before, config, table, "sentence", "cpu")
    file = folder / "config.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps(values | {"transformers_version": "0.0.0", "dtype": "float16"}))
    assert embedlab.load(folder).fingerprint() == before.fingerprint(), "of another release"
    file.write_text(json.dumps(values | change))
    other = embedlab.load(folder)
    found = text_vectors(other, config, table, "sentence", "cpu")
    np.testing.assert_allclose(found, other.encode(KEPT), rtol=1e-3, atol=1e-3)
    assert not np.allclose(found, first, atol=1e-3)
