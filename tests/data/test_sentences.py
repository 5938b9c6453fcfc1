from __future__ import annotations

import pytest

from embedlab.data.packages import prose, split_sentences


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("It rains. It pours! Does it? Yes.", ["It rains.", "It pours!", "Does it?", "Yes."]),
        ("Dr. Who met Mr. Smith. They left.", ["Dr. Who met Mr. Smith.", "They left."]),
        ("J. R. R. Tolkien wrote. He did.", ["J. R. R. Tolkien wrote.", "He did."]),
        ("The U.S. Army came. It saw.", ["The U.S. Army came.", "It saw."]),
        ("It cost 2.5 dollars. 30 came.", ["It cost 2.5 dollars.", "30 came."]),
        ('He said "Stop." Then he left.', ['He said "Stop."', "Then he left."]),
        ("It ended (in 1990.) Then peace came.", ["It ended (in 1990.)", "Then peace came."]),
        ("apples etc. Then pears. Not whole", ["Then pears."]),
        ("Berlin, e.g. Mitte, is large.", ["Berlin, e.g. Mitte, is large."]),
    ],
)
def test_sentences_end_where_a_reader_ends_them(text: str, sentences: list[str]) -> None:
    assert list(split_sentences(text, shortest=1)) == sentences


def test_short_and_long_sentences_are_left_out() -> None:
    text = f"Short one. {'A sentence of middling length is kept.'} A{' very' * 200} long one."
    assert list(split_sentences(text)) == ["A sentence of middling length is kept."]


def test_prose_leaves_markup_out() -> None:
    wikitext = "\n".join(
        [
            "==History==",
            "* a list item that is long enough to be taken for a paragraph of prose",
            "The '''Aardvark''' (, ''Orycteropus afer'') is a medium-sized , burrowing mammal from Africa.",
            "{| class=wikitable that was not removed and is long enough to be a paragraph",
            "Too short.",
        ]
    )
    assert list(prose(wikitext)) == [
        'The Aardvark (, "Orycteropus afer") is a medium-sized, burrowing mammal from Africa.'
    ]
