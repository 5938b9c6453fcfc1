"""Tokenizers from text: the same each time, with the special tokens of their kind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transformers import AutoTokenizer

from embedlab.backbones import train_tokenizer
from embedlab.errors import UserError
from tests.support import SENTENCES

TEXTS = [f"{a[: len(a) // 2]} {b[len(b) // 2 :]}" for a in SENTENCES for b in SENTENCES]
KINDS = [
    ("bert", "wordpiece"),
    ("roberta", "bpe"),
    ("gpt2", "bpe"),
    ("xlm-roberta", "unigram"),
    ("llama", "unigram"),
]


def shape(model_type: str, kind: str, **more: object) -> dict[str, object]:
    return {
        "model_type": model_type,
        "vocab_size": 420,
        "max_positions": 48,
        "tokenizer": {"type": kind, **more},
    }


@pytest.mark.parametrize(("model_type", "kind"), KINDS)
def test_the_same_texts_give_the_same_tokenizer(model_type: str, kind: str) -> None:
    first, second = (train_tokenizer(shape(model_type, kind), iter(TEXTS)) for _ in range(2))
    assert first.backend_tokenizer.to_str() == second.backend_tokenizer.to_str()
    other = train_tokenizer(shape(model_type, kind), TEXTS[:40])
    assert other.backend_tokenizer.to_str() != first.backend_tokenizer.to_str()


@pytest.mark.parametrize(("model_type", "kind"), KINDS)
def test_special_tokens_and_round_trip(model_type: str, kind: str, tmp_path: object) -> None:
    tokenizer = train_tokenizer(shape(model_type, kind, lowercase=False), TEXTS)
    assert len(tokenizer) <= 420
    assert tokenizer.model_max_length == 48
    assert tokenizer.padding_side == "right"
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id} - {None}) >= 2
    text = "A man reads the old book."
    ids = tokenizer(text)["input_ids"]
    plain = tokenizer(text, add_special_tokens=False)["input_ids"]
    if model_type in ("gpt2", "llama"):
        assert ids == plain  # nothing is added: no EOS
        assert tokenizer.mask_token is None
    else:
        assert ids == [tokenizer.cls_token_id, *plain, tokenizer.sep_token_id]
        assert tokenizer("a " + tokenizer.mask_token)["input_ids"].count(tokenizer.mask_token_id) == 1
    assert "[UNK]" not in tokenizer.convert_ids_to_tokens(ids)
    assert (
        tokenizer.decode(plain).strip() == text.replace(".", " .") or tokenizer.decode(plain).strip() == text
    )
    tokenizer.save_pretrained(str(tmp_path))
    again = AutoTokenizer.from_pretrained(str(tmp_path))
    assert again(text)["input_ids"] == ids
    assert again.pad_token_id == tokenizer.pad_token_id
    assert again.model_max_length == 48


def test_lowercase() -> None:
    upper, lower = "A Man", "a man"
    for model_type, kind in KINDS:
        for wanted in (True, False):
            t = train_tokenizer(shape(model_type, kind, lowercase=wanted), TEXTS)
            assert (t(upper)["input_ids"] == t(lower)["input_ids"]) == wanted, (model_type, kind)
    assert train_tokenizer(shape("bert", "wordpiece"), TEXTS)(upper)["input_ids"]


def test_wordpiece_has_no_waste() -> None:
    """No ## piece of a character that never stands inside a word."""
    vocabulary = train_tokenizer(shape("bert", "wordpiece"), TEXTS).get_vocab()
    assert "." in vocabulary
    assert "##." not in vocabulary
    assert "##a" in vocabulary
    assert sorted(vocabulary.values()) == list(range(len(vocabulary)))


def test_a_stream_is_read_once_and_lazily() -> None:
    read = 0

    def stream() -> Iterator[str]:
        nonlocal read
        for text in TEXTS:
            read += 1
            yield text

    train_tokenizer(shape("bert", "wordpiece"), stream())
    assert read == len(TEXTS)


def test_bad_input() -> None:
    with pytest.raises(UserError, match="no text to learn"):
        train_tokenizer(shape("bert", "wordpiece"), [])
    with pytest.raises(UserError, match="a decoder writes"):
        train_tokenizer(shape("gpt2", "wordpiece"), TEXTS)
    with pytest.raises(UserError, match=r"backbone\.fresh\.tokenizer\.typ "):
        train_tokenizer({"tokenizer": {"typ ": "bpe"}}, TEXTS)
