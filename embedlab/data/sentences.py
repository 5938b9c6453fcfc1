"""From running English text to sentences, by rule: enough for training text, and nothing to download."""

from __future__ import annotations

import re
from collections.abc import Iterator

_ABBREVIATIONS = frozenset(
    """
    mr mrs ms dr prof st sr jr vs e.g i.e cf ca c b d fl approx no nos vol vols pp p ed eds est al inc ltd co
    corp u.s u.k u.n gen col lt capt sgt rev hon gov sen rep pres jan feb mar apr jun jul aug sep sept oct nov
    dec fig ch sec r v op cit viz lit trans
    """.split()  # noqa: SIM905
)
# A stop with its closing quotes and brackets, a space, and what may start a sentence.
_STOP = re.compile(r"""([.!?]+["'”’)\]]*)\s+(?=["'“‘(\[]*[A-Z0-9])""")
_LAST_WORD = re.compile(r"([\w.]+)\.+[\"'”’)\]]*$")
_INITIALS = re.compile(r"(?:[A-Z]\.)*[A-Z]")
_MARKUP = re.compile(r"[{}|<>\[\]]|https?:|thumb|\bpx\b|==|^\W*$")
_SPACE = re.compile(r"\s+")
_EMPTY_BRACKETS = re.compile(r"\s*\((?:[\s,;:]|or|and)*\)")
_SPACE_BEFORE = re.compile(r"\s+([,.;:!?)])")


def prose(wikitext: str) -> Iterator[str]:
    """The paragraphs of running text of an article whose markup `gensim`'s filter has taken out.

    Headings, lists, tables and lines with markup left in them are skipped.
    """
    for line in wikitext.splitlines():
        if not line or line[0] in "*#:;=|!{}-" or line.startswith(("File:", "Image:", "Category:")):
            continue
        text = line.replace("'''", "").replace("''", '"')
        text = _EMPTY_BRACKETS.sub("", text)
        text = _SPACE_BEFORE.sub(r"\1", _SPACE.sub(" ", text)).strip()
        if len(text) >= 60 and not _MARKUP.search(text):
            yield text


def split_sentences(text: str, shortest: int = 30, longest: int = 500) -> Iterator[str]:
    """The sentences of a paragraph that end as sentences and have `shortest` to `longest` characters.

    A stop after an abbreviation or an initial does not end one.
    """
    start = 0
    for stop in [*_STOP.finditer(text), None]:
        end = len(text) if stop is None else stop.end(1)
        if stop is not None and _is_abbreviation(text[start:end]):
            continue
        sentence = text[start:end].strip()
        start = end
        whole = sentence.rstrip("\"'”’)]")[-1:] in (".", "!", "?") and not sentence[:1].islower()
        if whole and shortest <= len(sentence) <= longest:
            yield sentence


def _is_abbreviation(text: str) -> bool:
    word = _LAST_WORD.search(text)
    if word is None:
        return False
    return word[1].lower() in _ABBREVIATIONS or _INITIALS.fullmatch(word[1]) is not None
