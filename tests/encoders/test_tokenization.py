"""Templates, cuts, marks and padding: the ids are right whatever the sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embedlab.config.template import Template
from embedlab.encoders.tokenization import Tokenization
from embedlab.errors import UserError
from tests.support import DECODERS, ENCODERS, MODEL_TYPES, SENTENCES, tiny_tokenizer

BERT = Template('This sentence of "{sentence}" means {mask}.')
ROBERTA = Template("This sentence : ' {sentence} ' means{mask}.")
EOL = Template('This sentence : "{sentence}" means in one word{rep1}, it can be summarized as{rep2}', "text")
TEMPLATES = (BERT, ROBERTA, EOL, Template("query: {sentence}"), Template("{sentence} says:", "text"))
AWKWARD = (
    "", " ", "  hello ", "[MASK]", "a [MASK] b <mask> c", "{sentence} {mask} {0} %s", '"quoted" "', "naïve – 中文 🎉",
    "it's 42%, e.g. (this).", "\ttab\nand line", "<s> </s> <|endoftext|> [SEP]", "word " * 200, "x" * 300, "é" * 100,
)  # fmt: skip


def tokenizer(model_type: str, max_length: int = 64) -> Any:
    made = tiny_tokenizer(model_type, max_length=max_length)
    if made.pad_token is None:
        made.pad_token = made.eos_token
    return made


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Any]:
    return {m: tokenizer(m) for m in MODEL_TYPES}


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_ids_are_those_of_hugging_face(tokenizers: dict[str, Any], model_type: str) -> None:
    hf = tokenizers[model_type]
    texts = [*SENTENCES, *AWKWARD[1:]]
    ours = Tokenization(hf, max_length=20).ids(texts)
    assert ours == hf(texts, truncation=True, max_length=20)["input_ids"]
    assert Tokenization(hf).ids(texts) == hf(texts, truncation=True, max_length=64)["input_ids"]


def test_a_truncation_in_the_tokenizer_file_has_no_effect() -> None:
    hf = tokenizer("bert")
    before = Tokenization(hf).ids(["word " * 30])
    hf.backend_tokenizer.enable_truncation(5)
    hf.backend_tokenizer.enable_padding(length=40)
    assert Tokenization(hf).ids(["word " * 30]) == before


def test_white_space_is_not_stripped(tokenizers: dict[str, Any]) -> None:
    ids = Tokenization(tokenizers["gpt2"]).ids(["  hello "])[0]
    assert tokenizers["gpt2"].decode(ids) == "  hello "


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_no_row_is_empty(tokenizers: dict[str, Any], model_type: str) -> None:
    assert all(len(row) >= 1 for row in Tokenization(tokenizers[model_type]).ids(["", " "]))


def test_one_string_is_refused(tokenizers: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="not one string"):
        Tokenization(tokenizers["bert"]).ids("a sentence")


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda t: t.text[:24])
@pytest.mark.parametrize("model_type", ["bert", "roberta", "xlm-roberta", "gpt2", "llama", "opt"])
def test_the_template_is_never_cut(tokenizers: dict[str, Any], model_type: str, template: Template) -> None:
    """Pitfalls 31 and 32: the suffix ids, and with them the marks, stand at the end of every row."""
    if "mask" in template.marks and model_type in DECODERS:
        pytest.skip("no mask token")
    hf = tokenizers[model_type]
    for max_length in (None, 8):
        tokens = Tokenization(hf, template, max_length)
        empty = tokens.ids([""])[0]
        tail = 1 + max(tokens.marks.values(), default=-1)
        for text, row in zip(AWKWARD, tokens.ids(AWKWARD), strict=True):
            assert len(row) <= 64
            if template.join == "ids":
                assert row[: len(tokens.prefix_ids)] == tokens.prefix_ids
                assert row[len(row) - len(tokens.suffix_ids) :] == tokens.suffix_ids
                if max_length is not None:
                    assert len(row) <= tokens.overhead + max_length
            assert row[len(row) - tail :] == empty[len(empty) - tail :], text
            if "mask" in tokens.marks:
                assert row[-1 - tokens.marks["mask"]] == hf.mask_token_id


_LETTERS = [*list("ab ce.,!?'\"-()\n\t013:AZ"), "é", "中", "🎉", "\xa0", "word", '."', "the "]


@settings(max_examples=60, deadline=None)
@given(
    text=st.lists(st.sampled_from(_LETTERS), max_size=80).map("".join),
    limit=st.integers(1, 20),
    join=st.sampled_from(["ids", "text"]),
)
def test_marks_hold_for_any_text(text: str, limit: int, join: str) -> None:
    tokens = Tokenization(_GPT2, Template('Say "{sentence}" in one word{rep1}, it means{rep2}', join), limit)
    empty, row = tokens.ids(["", text])
    tail = tokens.marks["rep1"] + 1
    assert row[-tail:] == empty[-tail:]
    assert len(row) <= 64
    if join == "ids":
        assert len(row) <= len(empty) + limit


_GPT2 = tokenizer("gpt2")


@pytest.mark.parametrize("model_type", ["roberta", "gpt2"])
def test_the_sentence_keeps_its_leading_space_form(tokenizers: dict[str, Any], model_type: str) -> None:
    """PromptBERT tokenises it without the space in training and with it at test: here it is one form, that
    of the
    template."""
    hf = tokenizers[model_type]
    after_space = Tokenization(hf, Template("say ' {sentence} ' now")).ids(["the"])[0]
    after_quote = Tokenization(hf, Template('say "{sentence}" now')).ids(["the"])[0]
    assert hf("say ' the ' now")["input_ids"] == after_space
    assert hf('say "the" now')["input_ids"] == after_quote


def test_rep_marks_are_the_tokens_before_them(tokenizers: dict[str, Any]) -> None:
    """CSE-SFP: Rep1 is the word before the comma, Rep2 the last token; k = 6 or 7 tokens apart."""
    for model_type, k in (("llama", 6), ("bert", 6)):
        hf = tokenizers[model_type]
        tokens = Tokenization(hf, EOL)
        row = tokens.ids(["the cat"])[0]
        words = hf.convert_ids_to_tokens(row)
        assert words[-1 - tokens.marks["rep1"]].strip("▁") == "word"
        assert words[-1 - tokens.marks["rep2"]].strip("▁") == "as"
        assert tokens.marks["rep1"] - tokens.marks["rep2"] == k


def test_joined_as_text_is_the_whole_string_tokenised(tokenizers: dict[str, Any]) -> None:
    hf = tokenizers["llama"]
    text = 'It rains "a lot."'
    expected = hf(f'This sentence : "{text}" means in one word, it can be summarized as')["input_ids"]
    assert Tokenization(hf, EOL).ids([text])[0] == expected


@pytest.mark.parametrize("model_type", ["bert", "gpt2", "llama"])
def test_a_cut_text_is_a_beginning_within_its_limit(tokenizers: dict[str, Any], model_type: str) -> None:
    tokens = Tokenization(tokenizers[model_type])
    for text in (SENTENCES[0], "é" * 9, "unheard-of words"):
        ids = tokens.plain_ids([text])[0]
        for limit in range(len(ids) + 1):
            short = tokens._shorten(text, ids, limit)
            assert text.startswith(short)
            assert len(tokens.plain_ids([short])[0]) <= limit
        assert tokens._shorten(text, ids, 0) == ""
        assert tokens._shorten(text, ids, len(ids)) == tokens._shorten(text, ids, None) == text


def test_joined_as_text_the_sentence_is_cut_to_its_limit(tokenizers: dict[str, Any]) -> None:
    hf = tokenizers["gpt2"]
    rows, cut = Tokenization(hf, EOL, 5).ids_and_cut(["the cat sat on the mat", "a"])
    assert cut == [True, False]
    sentence = hf.decode(rows[0]).split('"')[1]
    assert len(hf(sentence)["input_ids"]) <= 5
    assert "the cat sat on the mat".startswith(sentence)


def test_a_sentence_without_room_in_its_context_is_left_out() -> None:
    """A word of one token alone has more after the quotation mark: its cut is at 0, and the row as without it."""
    template = Template('Say"{sentence}" in one word{rep1}, it means{rep2}', "text")
    room = Tokenization(tokenizer("llama"), template).overhead + 1
    tokens = Tokenization(tokenizer("llama", max_length=room), template)
    rows = tokens.ids([word for sentence in SENTENCES for word in sentence.split()])
    assert max(map(len, rows)) == room
    assert tokens.ids([""])[0] in rows
    assert tokens.ids(["playing"]) == tokens.ids([""])


def test_a_cut_inside_a_character_drops_the_character(tokenizers: dict[str, Any]) -> None:
    hf = tokenizers["gpt2"]
    per_character = len(hf("中")["input_ids"])
    assert per_character > 1
    row = Tokenization(hf, EOL, per_character + 1).ids(["中中"])[0]
    assert hf.decode(row).count("中") == 1
    assert "\ufffd" not in hf.decode(row)


def test_count_of_cut_sentences(tokenizers: dict[str, Any]) -> None:
    cut = Tokenization(tokenizers["bert"], max_length=6).ids_and_cut(["a b c d", "a b c d e", ""])[1]
    assert cut == [False, True, False]


def test_the_empty_sentence_is_the_template(tokenizers: dict[str, Any]) -> None:
    """PromptBERT's template-only pass: no sentence token at all."""
    tokens = Tokenization(tokenizers["roberta"], ROBERTA)
    assert len(tokens.ids([""])[0]) == tokens.overhead == len(tokens.prefix_ids) + len(tokens.suffix_ids)
    one = Tokenization(tokenizers["bert"], BERT)
    assert len(one.ids(["a"])[0]) == one.overhead + 1


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding(tokenizers: dict[str, Any], side: str) -> None:
    hf = tokenizer("bert")
    hf.padding_side = side
    tokens = Tokenization(hf)
    rows = tokens.ids(["a", "a b c", ""])
    padded = tokens.pad(rows, multiple=8)
    assert padded["input_ids"].shape == padded["attention_mask"].shape == (3, 8)
    assert padded["input_ids"].dtype == padded["attention_mask"].dtype == torch.int64
    for ids, mask, row in zip(padded["input_ids"], padded["attention_mask"], rows, strict=True):
        assert ids[mask.bool()].tolist() == row
        assert (ids[~mask.bool()] == tokens.pad_id).all()
        assert bool(mask[0 if side == "right" else -1])
    assert tokens.pad(rows)["input_ids"].shape == (3, 5)
    assert tokens.pad([])["input_ids"].shape == (0, 1)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("no place", "no place for the sentence"),
        ("{sentence} and {sentence}", "more than once"),
        ("{sentence} {mask} {mask}", "more than once"),
        ("{mask} is {sentence}", "stands before"),
        ("{sentence} is {msk}", "unknown marker {msk}"),
    ],
)
def test_bad_templates(text: str, part: str) -> None:
    with pytest.raises(UserError, match=part) as caught:
        Template(text)
    assert caught.value.key == "template.text"
    assert caught.value.fix


def test_braces_and_words_in_templates_are_text() -> None:
    template = Template("  { {sentence} } {rep1} ")
    assert template.before == "{ "
    assert template.marks == ("rep1",)


def test_bad_combinations(tokenizers: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="no mask token"):
        Tokenization(tokenizers["gpt2"], BERT)
    with pytest.raises(UserError, match="longer than the model's 64"):
        Tokenization(tokenizers["bert"], max_length=65)
    with pytest.raises(UserError, match="longer than the model's 64"):
        Tokenization(tokenizers["bert"], BERT, max_length=60)
    with pytest.raises(UserError, match="no room for a sentence"):
        Tokenization(tokenizers["bert"], max_length=2)
    with pytest.raises(UserError, match="leaves no room"):
        Tokenization(tokenizers["bert"], Template("word " * 70 + "{sentence}"))
    with pytest.raises(UserError, match=r"merges what stands around \{rep1\}"):
        Tokenization(tokenizers["gpt2"], Template("{sentence} means th{rep1}e word{rep2}"))
    with pytest.raises(UserError, match="join"):
        Template("{sentence}", join="format")


def test_fingerprint_follows_what_decides_the_ids(tokenizers: dict[str, Any]) -> None:
    hf = tokenizers["bert"]
    variants = [
        Tokenization(hf),
        Tokenization(hf, max_length=32),
        Tokenization(hf, BERT),
        Tokenization(hf, Template(BERT.text, "text")),
        Tokenization(tokenizers["distilbert"], max_length=16),
        Tokenization(tokenizers["roberta"]),
        Tokenization(tiny_tokenizer("bert", vocab_size=200)),
    ]
    assert len({v.fingerprint for v in variants}) == len(variants)
    assert Tokenization(tokenizer("bert")).fingerprint == variants[0].fingerprint
    assert Tokenization(tokenizers["bert"], max_length=64).fingerprint == variants[0].fingerprint


def test_an_upgrade_of_the_library_makes_no_other_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Tokenization(tokenizer("bert")).fingerprint
    monkeypatch.setattr("tokenizers.__version__", "9.9")
    assert Tokenization(tokenizer("bert")).fingerprint == before


def test_plain_values_and_back(tokenizers: dict[str, Any]) -> None:
    for tokens in (Tokenization(tokenizers["bert"], BERT, 20), Tokenization(tokenizers["bert"])):
        again = Tokenization.from_dict(tokens.tokenizer, tokens.to_dict())
        assert again.fingerprint == tokens.fingerprint
        assert again.marks == tokens.marks


def test_encoders_and_decoders_are_covered() -> None:
    assert set(MODEL_TYPES) == set(ENCODERS) | set(DECODERS)
