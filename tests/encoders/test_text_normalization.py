"""Evaluation text of the prompted decoders (invariant T15 of CSE-SFP)."""

from __future__ import annotations

import pytest

from embedlab.config.template import Template
from embedlab.encoders.text_normalization import TEXT_NORMALIZATIONS, close_sentence
from embedlab.encoders.tokenization import Tokenization
from tests.support import tiny_tokenizer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('He said "hi"', "He said 'hi'"),
        ("Why?", "Why."),
        ("A cat", "A cat."),
        ("A cat.", "A cat."),
        ("It's the cats'", "It's the cats'"),
        ('Did he say "why?"', "Did he say 'why?'"),  # the end is looked at before the quotes change
        ("  two   words\t", "two words."),
        ("", ""),
        ("   ", ""),
    ],
)
def test_t15_closed(text: str, expected: str) -> None:
    assert close_sentence(text) == expected
    assert close_sentence(expected) == expected


def test_raw_is_raw() -> None:
    assert TEXT_NORMALIZATIONS["raw"](' a "b"? ') == ' a "b"? '


def test_is_part_of_a_tokenization() -> None:
    template = Template('This sentence : "{sentence}" means something{rep1}, so it is{rep2}', "text")
    tokenizer = tiny_tokenizer("gpt2")
    plain = Tokenization(tokenizer, template)
    prepared = Tokenization(tokenizer, template, preparation="closed")
    assert prepared.ids(['Is it "hot"?', "A cat"]) == plain.ids(["Is it 'hot'.", "A cat."])
    assert prepared.fingerprint != plain.fingerprint
    again = Tokenization.from_dict(tokenizer, prepared.to_dict())
    assert again.fingerprint == prepared.fingerprint
    assert Tokenization.from_dict(tokenizer, {"template": None}).preparation == "raw"
