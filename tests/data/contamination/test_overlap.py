"""Overlap with evaluation sets: as a search by brute force finds it, whatever case and punctuation are."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embedlab.data.contamination.overlap import HeldOut, Hit, Overlap, words_of

WORDS = [f"w{i}" for i in range(40)]
LONG = " ".join(WORDS[:20])


def brute_force(held: list[str], text: str, n: int) -> list[Hit]:
    hits, words = [], words_of(text)
    for place, one in enumerate(held):
        wanted = words_of(one)
        size = min(n, len(wanted))
        windows = [wanted[i : i + size] for i in range(len(wanted) - size + 1)] if size >= min(8, n) else []
        shared = any(words[i : i + size] in windows for i in range(len(words) - size + 1))
        equal = words == wanted and len(words) >= 5
        if equal or shared:
            hits.append(Hit(0, place, equal))
    return hits


letters = st.lists(st.sampled_from("ab"), min_size=0, max_size=24).map(" ".join)


@settings(deadline=None, max_examples=300)
@given(
    st.lists(letters, max_size=6), st.lists(letters, min_size=1, max_size=6), st.sampled_from([5, 8, 13, 20])
)
def test_as_brute_force(held: list[str], texts: list[str], n: int) -> None:
    found = Overlap([HeldOut("one", "sts", held)], n).find(texts)
    assert found == [brute_force(held, text, n) for text in texts]


@pytest.mark.parametrize("words", range(1, 21))
@pytest.mark.parametrize("around", ["{}", "before {} after", "Before: “{}”, after…"])
def test_planted_overlaps(words: int, around: str) -> None:
    """Of a long text 13 words count; texts of 8 to 12 words as a whole; shorter ones of 5 as an equal text alone."""
    part = " ".join(WORDS[2 : 2 + words])
    of_long, of_itself = Overlap([HeldOut("long", "sts", [LONG])]), Overlap([HeldOut("all", "sts", [part])])
    text = around.format(part.upper().replace(" ", ", "))
    assert bool(of_long.find([text])[0]) == (words >= 13)
    assert bool(of_itself.find([text])[0]) == (words >= (5 if around == "{}" else 8))


def test_words() -> None:
    assert words_of("Ｆｕｌｌ-width: ﬁne, STRASSE/Straße $5!") == [
        "full",
        "width",
        "fine",
        "strasse",
        "strasse",
        "5",
    ]
    assert words_of("नमस्ते दुनिया") == ["नमस्ते", "दुनिया"], "marks are parts of words"
    assert words_of("—…!") == []


@pytest.mark.parametrize(
    "text",
    ["一个男人正在舞台上弹奏一把旧吉他", "男の人が舞台で古いギターを弾いている", "ผู้ชายกำลังเล่นกีตาร์เก่าบนเวที"],
)
def test_scripts_without_spaces_are_compared_by_characters(text: str) -> None:
    overlap = Overlap([HeldOut("one", "sts", [text])])
    assert overlap.find([f"「{text}」。", f"前{text}后", f"a\t{text[:7]}\n{text[7:]} b", text[:10], text[1:7] * 9]) == [
        [Hit(0, 0, True)], [Hit(0, 0, False)], [Hit(0, 0, False)], [], [],
    ]  # fmt: skip
    assert bool(overlap.find([text[:13]])[0])
    assert len(words_of("한국어 문장입니다")) == 2, "Korean has spaces"


@pytest.mark.parametrize("space", ["\t", "\n", "\r\n", "\u2028", "\u3000", "\xa0", "\x0b", " \t\n"])
def test_any_space_parts_words(space: str) -> None:
    assert Overlap([HeldOut("long", "sts", [LONG])]).find([LONG.replace(" ", space)]) == [[Hit(0, 0, True)]]


def test_a_window_does_not_reach_over_the_end_of_a_text() -> None:
    overlap = Overlap([HeldOut("long", "sts", [LONG])])
    half = [" ".join(WORDS[:10]), " ".join(WORDS[10:20])]
    assert overlap.find(half) == [[], []]
    assert overlap.find([]) == []
    assert Overlap([]).find([LONG]) == [[]]


def test_identity_is_of_the_texts_and_the_window() -> None:
    def identity(*texts: str, n: int = 13) -> str:
        return Overlap([HeldOut("x", "sts", texts)], n).identity

    assert identity("A cat sat.", LONG) == identity("a CAT sat", LONG)
    assert len({identity("a cat", LONG), identity(LONG, "a cat"), identity(LONG), identity(LONG, n=12)}) == 4
