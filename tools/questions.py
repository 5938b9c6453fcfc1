"""Questions made of statements, by their words' places alone: text in the form of a question, not questions to answer.

A model that is distilled from statements alone has not seen how a question says which kind of answer it asks for
(docs/results/box.md: most of what was lost on TREC).
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator
from functools import partial

LONGEST = 14
"""Words of a question: people ask for less than a sentence of an encyclopedia tells."""

_BE = ("is", "are", "was", "were")
_ENDS = (
    "the", "a", "an", "of", "in", "and", "or", "to", "by", "with", "at", "on", "for", "from", "as", "that", "which",
)  # fmt: skip
_STATEMENT = re.compile(
    rf"^(?P<subject>(?:\S+ ){{1,6}}?)"
    rf"(?P<verb>{'|'.join(_BE)}|has|had|can|could|became|won|made|began|\w+[^e\W]ed) (?P<rest>.+)$"
)
_DATE = re.compile(
    r",? (?:in|on|since) (?:the )?(?:\d{1,2} )?(?:January|February|March|April|May|June|July|August|September|October"
    r"|November|December)?(?: \d{1,2},)? ?(?:1[5-9]|20)\d\d(?=\W|$)"
)
_PLACE = re.compile(r",? (?:in|at|near|from) (?:the )?[A-Z][\w'-]+(?:,? [A-Z][\w'-]+)*")
_COUNT = re.compile(
    r"\b(?:\d[\d,]*|two|three|four|five|six|seven|eight|nine|ten|twelve|several|many) ([a-z]{3,}s)\b(.*)"
)
_SHORT = re.compile(r"\(([A-Z][A-Za-z]*[A-Z])\)|^([A-Z]{2,6}) ")
_BEFORE = re.compile(
    r"^(?:In|On|At|By|From|During|After|Before|Since|Despite|When|As|For|With|While|Although|Under)\b[^,]*, "
)
_NO_NAME = (
    "There", "In", "On", "At", "By", "From", "After", "Since", "Despite", "When", "As", "For", "With", "While", "If",
)  # fmt: skip
_PERSON = re.compile(r"^(?:He|She|[A-Z][a-z]+ (?:[A-Z]\. )?[A-Z][a-z]+) $")
_IRREGULAR = {
    "became": "become", "won": "win", "made": "make", "began": "begin", "has": "have", "had": "have",
}  # fmt: skip
_MUTE_E = re.compile(r"(?:[aeiou][cgsuvz]|[^aeiou][aeiou][dkmt]|at|[bpt]l|nc|rv|rg)$")
_KINDS = (
    "city", "country", "company", "band", "film", "book", "animal", "team", "river", "state", "disease", "language",
    "color", "plant", "game", "mountain", "food", "ship", "song", "university", "instrument", "king", "president",
    "author", "actor", "player", "year", "island", "newspaper", "war", "award", "product", "church", "organization",
)  # fmt: skip


def questions(sentences: Iterable[str], seed: int = 42, longest: int = LONGEST) -> Iterator[str]:
    """At most one question of each sentence, of the kinds that its words allow.

    Args:
        sentences: statements.
        seed: which kind, word and punctuation is taken.
        longest: words of a question; what follows is cut off.

    Yields:
        questions that end with a question mark.
    """
    drawn = random.Random(seed)
    for sentence in sentences:
        found = [text for text in _of(sentence.strip(" .\"'"), drawn, longest) if len(text.split()) > 2]
        if found:
            yield drawn.choice(found) + drawn.choice(("?", " ?"))


def _of(sentence: str, drawn: random.Random, longest: int) -> Iterator[str]:
    cut = partial(_cut, longest=longest)
    if short := _SHORT.search(sentence):
        yield f"What does {short[1] or short[2]} {drawn.choice(('stand for', 'mean'))}"
    if (count := _COUNT.search(sentence)) and len(count[2].split()) > 2:
        yield cut(f"How many {count[1]}{count[2]}")
    found = _STATEMENT.match(_BEFORE.sub("", sentence))
    if not found or found["subject"].split()[0] in _NO_NAME:
        return
    subject, verb, rest = found["subject"], found["verb"], found["rest"]
    person = bool(_PERSON.match(subject))
    which = f"{drawn.choice(('What', 'Which'))} {drawn.choice(_KINDS)}"
    yield cut(f"{'Who' if person else drawn.choice(('What', which))} {verb} {rest}")
    name = subject.strip()
    if not name[0].isupper() or name in ("He", "She", "It", "They", "This", "These"):
        return
    if name.split()[0] in ("The", "A", "An", "His", "Her", "Its", "Their"):
        name = name[0].lower() + name[1:]
    if verb in _BE:
        yield f"{'Who' if person else 'What'} {verb} {name}"
        told = re.match(r"(?:an?|the) ", rest)
        yield cut(f"Name {rest}" if told else f"{drawn.choice(('How', 'Why'))} {verb} {name} {rest}")
        helper, left = verb, f"{name} {rest}"
    else:
        helper, left = "did", f"{name} {_plain(verb)} {rest}"
    if _DATE.search(left):
        yield cut(f"{drawn.choice(('When', 'What year'))} {helper} {_DATE.sub('', left)}")
    if _PLACE.search(left):
        yield cut(
            f"{drawn.choice(('Where', 'Where', 'What city', 'What country'))} {helper} {_PLACE.sub('', left, count=1)}"
        )
    if helper == "did":
        yield cut(f"{drawn.choice(('How', 'Why', 'What'))} did {left}")


def _plain(verb: str) -> str:
    """The verb after `did`, near enough."""
    if verb in _IRREGULAR or not verb.endswith("ed"):
        return _IRREGULAR.get(verb, verb)
    stem = verb[:-2]
    if len(stem) > 2 and stem[-1] == stem[-2] and stem[-1] not in "sl":
        return stem[:-1]
    return stem + "e" if _MUTE_E.search(stem) else stem


def _cut(text: str, longest: int) -> str:
    words = re.split(r"[,;:(]| which | who | where | because | while ", text)[0].split()[:longest]
    while words and words[-1].lower() in _ENDS:
        words.pop()
    return " ".join(words)
