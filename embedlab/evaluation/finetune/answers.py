"""When two answers are the same: MLQA's official normalisation by language, SQuAD's, exact match and F1.

MLQA (Lewis et al. 2020, mlqa_evaluation_v1): lower case, punctuation of any script removed, articles of the
answer's language removed, then words split at spaces, in Chinese every Han character for itself. The language
is that of the passage, from which the answer is taken. Japanese and Korean are not in MLQA: Japanese and Thai,
which do not write spaces either, are split by character here, Korean at its spaces.
SQuAD v1.1's form, which XTREME uses for XQuAD: ASCII punctuation and English articles removed, split at spaces.
"""

from __future__ import annotations

import re
import string
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache

Normalise = Callable[[str], list[str]]

_ARTICLES = {
    "en": r"\b(?:a|an|the)\b",
    "es": r"\b(?:un|una|unos|unas|el|la|los|las)\b",
    "vi": r"\b(?:của|là|cái|chiếc|những)\b",
    "de": r"\b(?:ein|eine|einen|einem|eines|einer|der|die|das|den|dem|des)\b",
    # As the official script has it: its first branch cannot match, the second removes the article anywhere.
    "ar": r"\sال^|ال",
}
_BY_CHARACTER = {"zh": "\u4e00-\u9fa5", "ja": "\u3040-\u30ff\u4e00-\u9fa5", "th": "\u0e00-\u0e7f"}


@cache
def _punctuation() -> dict[int, None]:
    """What `str.translate` drops: Unicode's punctuation and ASCII's."""
    points = [i for i in range(sys.maxunicode) if unicodedata.category(chr(i)).startswith("P")]
    return dict.fromkeys([*points, *map(ord, string.punctuation)])


def mlqa_words(answer: str, language: str) -> list[str]:
    """The words of an answer in `language` that MLQA compares."""
    text = answer.lower().translate(_punctuation())
    if language in _ARTICLES:
        text = re.sub(_ARTICLES[language], " ", text)
    if language in _BY_CHARACTER:
        text = re.sub(f"([{_BY_CHARACTER[language]}])", r" \1 ", text)
    return text.split()


def squad_words(answer: str) -> list[str]:
    """The words of an answer that SQuAD v1.1 compares, whatever the language."""
    text = answer.lower().translate(dict.fromkeys(map(ord, string.punctuation)))
    return re.sub(_ARTICLES["en"], " ", text).split()


def exact(predicted: Sequence[str], right: Sequence[str]) -> float:
    """1 where the words are the same, else 0."""
    return float(list(predicted) == list(right))


def f1(predicted: Sequence[str], right: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of the words, repeats counted; 0 where no word is shared."""
    shared = sum((Counter(predicted) & Counter(right)).values())
    if shared == 0:
        return 0.0
    precision, recall = shared / len(predicted), shared / len(right)
    return 2 * precision * recall / (precision + recall)


def scores(predictions: Sequence[str], answers: Sequence[Sequence[str]], language: str) -> dict[str, float]:
    """Means in percent over questions, each against its best right answer: em and f1 (MLQA's form in
    `language`), em_squad and f1_squad.

    Raises ValueError without questions.
    """
    if not predictions or len(predictions) != len(answers):
        raise ValueError(f"{len(predictions)} predictions for {len(answers)} questions")

    def mlqa(answer: str) -> list[str]:
        return mlqa_words(answer, language)

    forms: dict[str, Normalise] = {"": mlqa, "_squad": squad_words}
    found: dict[str, float] = {}
    for name, words in forms.items():
        total = {"em": 0.0, "f1": 0.0}
        for predicted, right in zip(predictions, answers, strict=True):
            mine, theirs = words(predicted), [words(answer) for answer in right]
            total["em"] += max(exact(mine, other) for other in theirs)
            total["f1"] += max(f1(mine, other) for other in theirs)
        found |= {f"{metric}{name}": 100 * value / len(predictions) for metric, value in total.items()}
    return found
