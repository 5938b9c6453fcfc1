"""Surface noise on sentences: typing errors, letter case, punctuation, lost endings.

Each function takes a sentence, a rate in [0, 1] and a random generator; rate 0 gives the sentence back.
`perturb` seeds the generator from the sentence itself, so that a sentence gets the same noise wherever it
appears, on every machine.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Callable

from embedlab.errors import UserError, one_of

# Neighbours on a QWERTY keyboard: the slips that a typist makes.
_KEYBOARD = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
_NEIGHBOURS = {
    key: [
        other
        for r, row in enumerate(_KEYBOARD)
        for c, other in enumerate(row)
        if other != key and abs(r - kr) <= 1 and abs(c - kc) <= 1
    ]
    for kr, keys in enumerate(_KEYBOARD)
    for kc, key in enumerate(keys)
}
_WORD = re.compile(r"[^\W\d_]{2,}")
_PUNCTUATION = re.compile(rf"[{re.escape(string.punctuation)}]")


def typos(sentence: str, rate: float, generator: random.Random) -> str:
    """Each word of two letters or more gets one slip with probability `rate`: two letters swapped, one lost,
    one doubled, or a neighbouring key.
    """
    return _WORD.sub(lambda m: _slip(m[0], generator) if generator.random() < rate else m[0], sentence)


def case(sentence: str, rate: float, generator: random.Random) -> str:
    """Each word is written in capitals with probability `rate`, or in small letters where it is in
    capitals.
    """

    def change(match: re.Match[str]) -> str:
        word = match[0]
        if generator.random() >= rate:
            return word
        return word.lower() if word.isupper() else word.upper()

    return _WORD.sub(change, sentence)


def punctuation(sentence: str, rate: float, generator: random.Random) -> str:
    """Each punctuation mark is lost with probability `rate`, each gap between words gets a comma with a tenth
    of it.
    """
    kept = _PUNCTUATION.sub(lambda m: "" if generator.random() < rate else m[0], sentence)
    words = kept.split(" ")
    return " ".join(
        word + "," if word and i < len(words) - 1 and generator.random() < rate / 10 else word
        for i, word in enumerate(words)
    )


def truncation(sentence: str, rate: float, generator: random.Random) -> str:
    """The last `rate` of the words is cut off, rounded up; the first word stays."""
    words = sentence.split()
    cut = min(len(words) - 1, -int(-len(words) * rate // 1))
    return sentence if cut <= 0 else " ".join(words[:-cut])


NOISES: dict[str, Callable[[str, float, random.Random], str]] = {
    "typos": typos,
    "case": case,
    "punctuation": punctuation,
    "truncation": truncation,
}


def perturb(sentence: str, noise: str, rate: float, seed: int) -> str:
    """`sentence` with one kind of `NOISES`. Raises UserError for an unknown kind or a rate outside [0, 1]."""
    if noise not in NOISES:
        raise UserError("no such noise", key="noises", value=noise, fix=one_of(noise, NOISES))
    if not 0 <= rate <= 1:
        raise UserError("must be between 0 and 1", key="noise_rate", value=rate, fix="noise_rate=0.2")
    # A string seeds random.Random through SHA-512: the same in every process, unlike hash().
    return NOISES[noise](sentence, rate, random.Random(f"{seed} {noise} {sentence}"))


def _slip(word: str, generator: random.Random) -> str:
    kind = generator.choice(("swap", "lose", "double", "neighbour"))
    i = generator.randrange(len(word) - 1)
    if kind == "swap":
        # Swapping equal letters would be no slip.
        different = [j for j in range(len(word) - 1) if word[j] != word[j + 1]]
        if different:
            i = generator.choice(different)
            return word[:i] + word[i + 1] + word[i] + word[i + 2 :]
        kind = "lose"
    if kind == "lose":
        return word[:i] + word[i + 1 :]
    near = _NEIGHBOURS.get(word[i].lower())
    if kind == "double" or not near:
        return word[:i] + word[i] + word[i:]
    key = generator.choice(near)
    return word[:i] + (key.upper() if word[i].isupper() else key) + word[i + 1 :]
