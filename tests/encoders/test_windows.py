"""Windows are bounded and in order; of a long text the beginning gives the same row as the whole."""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from embedlab.config.template import Template
from embedlab.encoders import tokenization as tokens
from embedlab.encoders import windows as module
from embedlab.encoders.text_normalization import TEXT_NORMALIZATIONS
from embedlab.encoders.tokenization import Tokenization
from embedlab.encoders.windows import head, splits_at_spaces, windows
from embedlab.errors import UserError
from tests.support import MODEL_TYPES, tiny_tokenizer

TEMPLATES = {
    None: None,
    "ids": Template("This {sentence} means"),
    "text": Template('"{sentence}" is', join="text"),
}
PIECES = st.sampled_from(
    ["the", "cat", "Cats", "a", "library", "12", "3.5", "don't", ".", "!?", "ΣΑΣ", "é", "e\u0301", "中文", "한국", "ß",
     "ﬁ", "  ", "\n", ".\n\n", "\t", "\u00a0", "-", '"', "[MASK]", "<mask>", "x" * 30, "\u200b", "½", "▁", "🙂"]
)  # fmt: skip
TEXT = st.lists(st.tuples(PIECES, st.sampled_from([" ", "", " ", "  "])), max_size=60).map(
    lambda parts: "".join(a + b for a, b in parts)
)


@given(
    st.lists(st.text(max_size=9), max_size=30),
    st.integers(1, 7),
    st.integers(50, 300),
    st.sampled_from([1, 2, 8]),
)
def test_windows_are_the_items_in_order_within_both_bounds(
    texts: list[str], rows: int, size: int, first: int
) -> None:
    found = list(windows(texts, rows, size, first=first))
    assert [text for window in found for text in window] == texts
    limits = [
        (max(1, rows // part), size // part) for part in (max(1, first >> i) for i in range(len(found)))
    ]
    for window, (most, held) in zip(found, limits, strict=True):
        assert 1 <= len(window) <= most
        assert len(window) == 1 or sum(map(sys.getsizeof, window)) <= held
    for (one, two), (most, held) in zip(pairwise(found), limits, strict=False):
        assert len(one) == most or sum(map(sys.getsizeof, [*one, two[0]])) > held, "as full as may be"


def test_no_more_is_read_than_a_window_needs() -> None:
    read = []

    def texts() -> Any:
        for i in range(100):
            read.append(i)
            yield str(i)

    next(windows(texts(), 10))
    assert len(read) == 10


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("join", TEMPLATES)
@pytest.mark.parametrize("side", ["right", "left"])
def test_of_a_long_text_a_part_gives_the_same_row(
    side: str, model_type: str, join: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tiny_tokenizer(model_type)
    tokenizer.truncation_side = side
    shortened = 0

    def counted(texts: list[str], *more: Any) -> list[str]:
        nonlocal shortened
        found = module.beginnings(texts, *more)
        shortened += sum(map(len, found)) < sum(map(len, texts))
        return found

    @settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(TEXT, max_size=4), st.integers(1, 6), st.sampled_from(sorted(TEXT_NORMALIZATIONS)))
    def same(texts: list[str], limit: int, preparation: str) -> None:
        room = 3 if join is None else 0
        tokenization = Tokenization(tokenizer, TEMPLATES[join], limit + room, preparation)
        texts = [*texts, " ".join([*texts, "the cat sat on"] * 3)]
        whole = tokenization.ids_and_cut(texts)
        with monkeypatch.context() as patch:
            patch.setattr(tokens, "beginnings", counted)
            patch.setattr(module, "LONG", 8)
            patch.setattr(tokens, "AT_ONCE", 400)
            assert tokenization.ids_and_cut(texts) == whole

    same()
    assert shortened == 0 or splits_at_spaces(tokenizer)


def test_beginnings_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The property above would also hold if nothing were ever cut."""
    tokenization = Tokenization(tiny_tokenizer("bert"), None, 12)
    seen: list[int] = []
    plain = Tokenization.plain_ids

    def noted(self: Tokenization, texts: list[str]) -> list[list[int]]:
        seen.extend(map(len, texts))
        return plain(self, texts)

    monkeypatch.setattr(Tokenization, "plain_ids", noted)
    text = "the cat sat on the mat " * 10_000
    assert tokenization.ids_and_cut([text]) == (
        [tokenization.ids(["the cat sat on the mat " * 9])[0]],
        [True],
    )
    assert max(seen) <= module.LONG


@pytest.mark.parametrize("text", ["word" * 2_000_000, " " * 8_000_000, "中" * 5_000_000])
def test_a_text_that_nothing_can_shorten_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"characters has no space .*Fix: texts of at most 4,194,304"):
        Tokenization(tiny_tokenizer("bert"), None, 12).ids([text])


def test_without_a_limit_or_without_pieces_nothing_is_cut() -> None:
    text = "the cat sat " * 3000
    for model_type, limit in (("llama", 12), ("bert", None)):
        tokenizer = tiny_tokenizer(model_type, max_length=10**30 if limit is None else 64)
        rows, cut = Tokenization(tokenizer, None, limit).ids_and_cut([text])
        assert cut == [limit is not None]
        assert (len(rows[0]) > 9000) == (limit is None)


@pytest.mark.parametrize(
    ("text", "size", "found"),
    [
        ("a b c", 4, "a b"),
        ("a b c", 3, "a"),
        ("one. two three", 12, "one. two"),
        ("one. two", 8, None),
        ("one \n two", 9, None),
        ("e e\u0301 \u0301x", 9, "e"),
        ("word", 4, None),
        ("a ", 9, None),
    ],
)
def test_heads_end_between_letters(text: str, size: int, found: str | None) -> None:
    assert head(text, size) == found


PLAIN = pre_tokenizers.Whitespace()


@pytest.mark.parametrize(
    ("normalizer", "splitter", "splits"),
    [
        (None, PLAIN, True),
        (normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()]), PLAIN, True),
        (normalizers.Replace(" ", "▁"), PLAIN, True),
        (normalizers.Replace(Regex(" {2,}"), " "), PLAIN, True),
        (normalizers.Replace(Regex(r"\w \w"), "x"), PLAIN, False),
        (normalizers.Replace("a b", "x"), PLAIN, False),
        (None, None, False),
        (None, pre_tokenizers.Metaspace(split=False), False),
        (None, pre_tokenizers.Punctuation(), False),
        (None, pre_tokenizers.ByteLevel(use_regex=False), False),
        (None, pre_tokenizers.FixedLength(4), False),
        (None, pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), pre_tokenizers.Digits()]), False),
        (None, pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]), True),
        (None, pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}| "), "isolated"), True),
        (None, pre_tokenizers.Split(Regex(r"[a-z ]+"), "isolated"), False),
    ],
)
def test_which_tokenizers_split_at_spaces(normalizer: Any, splitter: Any, splits: bool) -> None:
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    if normalizer is not None:
        backend.normalizer = normalizer
    if splitter is not None:
        backend.pre_tokenizer = splitter
    assert splits_at_spaces(PreTrainedTokenizerFast(tokenizer_object=backend)) is splits
    backend.add_tokens(["new york"])
    assert not splits_at_spaces(PreTrainedTokenizerFast(tokenizer_object=backend))
