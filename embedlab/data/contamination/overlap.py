"""Which texts stand in an evaluation set, whole or in part: equal texts, and shared windows of words.

Texts are compared after NFKC and case folding, with punctuation and symbols as spaces. A hit is an equal text of five
words or more, or a window of `n` (13) words that stands in both (Brown et al. 2020, appendix C); an evaluation text of
8 to n - 1 words is one window as a whole. Of scripts that write no spaces each character is a word.
"""

from __future__ import annotations

import hashlib
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

WINDOW = 13
_LEAST_WINDOW = 8
_LEAST_EQUAL = 5
_RULES = 2
"""Of what a word is: counts up where rows that were kept apart would be others."""
_ODD = np.uint64(0x9E3779B97F4A7C15)
_FILTER_BITS = 22


_WITHOUT_SPACES = (
    "CJK UNIFIED", "CJK COMPATIBILITY IDEOGRAPH", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR",
)  # fmt: skip
"""How the names of characters begin in scripts that write no spaces between words."""


@cache
def _parted() -> dict[int, str]:
    """What parts words: spaces for punctuation and symbols, and around characters of `_WITHOUT_SPACES`."""
    found = {}
    for character in map(chr, range(sys.maxunicode + 1)):
        if unicodedata.category(character)[0] in "PS":
            found[ord(character)] = " "
        elif unicodedata.name(character, "").startswith(_WITHOUT_SPACES):
            found[ord(character)] = f" {character} "
    return found


def words_of(text: str) -> list[str]:
    """The words that are compared."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    return text.casefold().translate(_parted()).split()


@dataclass(frozen=True)
class HeldOut:
    """One evaluation set.

    Args:
        name: such as ``sts12``.
        suite: that it belongs to, such as ``sts``.
        texts: all that are evaluated on.
        pairs: places in `texts` of those that are evaluated together; none where each stands for itself.
    """

    name: str
    suite: str
    texts: Sequence[str]
    pairs: Sequence[tuple[int, int]] = ()


class Hit(NamedTuple):
    """An evaluation text that a text holds: places of its set and in its texts; whether the texts are equal."""

    held: int
    text: int
    equal: bool


class Overlap:
    """Finds texts of evaluation sets in others, by hashes of their windows; what matches is compared word by word.

    Args:
        sets: what is looked for. Memory: 20 bytes a window, beside the texts.
        n: words of a window.
    """

    def __init__(self, sets: Sequence[HeldOut], n: int = WINDOW) -> None:
        self.sets, self.n = sets, n
        self._least = min(_LEAST_WINDOW, n)
        self._texts = [(h, t) for h, held in enumerate(sets) for t in range(len(held.texts))]
        self._equal: dict[int, list[int]] = {}
        heads: list[NDArray[np.uint64]] = []
        places: list[NDArray[np.int32]] = []
        digest = hashlib.blake2b(f"{_RULES} {n}".encode(), digest_size=12)
        for number, (h, t) in enumerate(self._texts):
            words = words_of(sets[h].texts[t])
            digest.update(" ".join([sets[h].suite, *words]).encode("utf-8", "replace") + b"\0")
            if len(words) >= _LEAST_EQUAL:
                self._equal.setdefault(hash(tuple(words)), []).append(number)
            if len(words) >= self._least:
                count = max(1, len(words) - n + 1)
                heads.append(_windows(_hashed(words), self._least)[:count])
                places.append(np.stack([np.full(count, number), np.arange(count)], 1).astype(np.int32))
        self.identity = digest.hexdigest()
        """Of what is looked for."""
        found = np.concatenate(heads) if heads else np.zeros(0, np.uint64)
        order = np.argsort(found, kind="stable")
        self._heads = found[order]
        self._places = np.concatenate(places)[order] if places else np.zeros((0, 2), np.int32)
        self._filter = np.zeros(1 << _FILTER_BITS, bool)
        self._filter[self._short(self._heads)] = True
        self._words = lru_cache(1 << 12)(lambda number: words_of(self._text(number)))

    def __len__(self) -> int:
        return len(self._texts)

    def facts(self) -> dict[str, Any]:
        """What was looked for, for a report."""
        suites = list(dict.fromkeys(held.suite for held in self.sets))
        return {"against": suites, "window": self.n, "texts": len(self), "identity": self.identity}

    def _text(self, number: int) -> str:
        held, text = self._texts[number]
        return self.sets[held].texts[text]

    @staticmethod
    def _short(heads: NDArray[np.uint64]) -> NDArray[np.uint64]:
        return heads >> np.uint64(64 - _FILTER_BITS)

    def find(self, texts: Sequence[str]) -> list[list[Hit]]:
        """What each text holds, in the order of the sets; a text that is met twice in one counts once."""
        words = [words_of(text) for text in texts]
        found: list[dict[int, bool]] = [{} for _ in texts]
        for place, some in enumerate(words):
            if len(some) >= _LEAST_EQUAL:
                for number in self._equal.get(hash(tuple(some)), ()):
                    if self._words(number) == some:
                        found[place][number] = True
        for place, start, number, first in self._candidates(words):
            if number not in found[place]:
                wanted = self._words(number)[first : first + self.n]
                if words[place][start : start + len(wanted)] == wanted:
                    found[place][number] = False
        return [[Hit(*self._texts[number], equal) for number, equal in sorted(one.items())] for one in found]

    def _candidates(self, words: Sequence[list[str]]) -> Iterator[tuple[int, int, int, int]]:
        """Where the first words of a window may stand: text and word there, number and word of the evaluation text."""
        sizes = np.array([len(some) for some in words])
        hashes = _windows(_hashed([word for some in words for word in some]), self._least)
        if not len(hashes) or not len(self._heads):
            return
        of_text, starts = np.repeat(np.arange(len(words)), sizes), np.cumsum(sizes) - sizes
        maybe = np.flatnonzero(self._filter[self._short(hashes)])
        place = of_text[maybe]
        maybe, place = (x[maybe - starts[place] + self._least <= sizes[place]] for x in (maybe, place))
        low, high = (np.searchsorted(self._heads, hashes[maybe], side) for side in ("left", "right"))
        for i in np.flatnonzero(high > low).tolist():
            for entry in range(int(low[i]), int(high[i])):
                number, first = self._places[entry].tolist()
                yield int(place[i]), int(maybe[i] - starts[place[i]]), number, first


def _hashed(words: Sequence[str]) -> NDArray[np.uint64]:
    # Python's own, which differ from process to process: they are never stored.
    return np.fromiter(map(hash, words), np.int64, len(words)).view(np.uint64)


def _windows(hashes: NDArray[np.uint64], size: int) -> NDArray[np.uint64]:
    """A hash of each `size` words that follow one another."""
    count = len(hashes) - size + 1
    found = np.zeros(max(0, count), np.uint64)
    for i in range(size if count > 0 else 0):
        found = found * _ODD + (hashes[i : i + count] ^ (hashes[i : i + count] >> np.uint64(29)))
    return found
