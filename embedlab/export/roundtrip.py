"""Does an exported encoder still give the same vectors? Asked on 32 sentences before the export is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from embedlab.encoders.base import Encoder

SENTENCES: tuple[str, ...] = (
    "A cat.",
    "The committee postponed its decision until the spring.",
    "Who wrote this, and when?",
    "  Two spaces before and after.  ",
    "ALL CAPITALS, AND A COMMA",
    "lower case without a full stop",
    'She said "no", then "perhaps"; he heard neither.',
    "Braces {like these} and [brackets] are text.",
    "A percentage of 12.5 % (up from 3 %), $40 and £7.",
    "naïve café façade jalapeño Ærøskøbing",
    "Привет, мир",
    "你好,世界",
    "こんにちは、世界",
    "안녕하세요, 세계",
    "مرحبا بالعالم",
    "שלום עולם",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "An emoji 🙂 in the middle, and a flag 🇩🇰.",
    "https://example.org/a?b=c&d=e#f",
    "def f(x): return x ** 2  # code",
    "[MASK] <mask> [CLS] [SEP] </s> <|endoftext|>",
    "tab\tand line\nbreak",
    "Donaudampfschifffahrtsgesellschaftskapitän",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "1234567890 " * 5,
    "One sentence that is a good deal longer than the others: padding must not matter to any of them.",
    "The quick brown fox jumps over the lazy dog, " * 4 + "and rests.",
    "word " * 300,
    ".",
    "!?",
    "x",
)
"""Short, long and over-long texts, scripts, quotes, mark-up, special tokens as text: what breaks exports."""


Vectors = NDArray[np.float64]


def _both(
    encoder: Encoder, other: Callable[[Sequence[str]], Any], normalize: bool
) -> tuple[Vectors, Vectors] | None:
    """The vectors of `SENTENCES` by each; None where the shapes differ or a value is not finite."""
    ours = np.asarray(encoder.encode(list(SENTENCES), normalize=normalize, output="numpy"), dtype=np.float64)
    theirs = np.asarray(other(list(SENTENCES)), dtype=np.float64)
    if ours.shape != theirs.shape or not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        return None
    return ours, theirs


def least_cosine(encoder: Encoder, other: Callable[[Sequence[str]], Any], normalize: bool = False) -> float:
    """The least cosine of a sentence's two vectors on `SENTENCES`, by `encoder` and by `other` (texts -> [n, D]).

    -inf where the shapes differ or a value is not finite.
    """
    if (both := _both(encoder, other, normalize)) is None:
        return float("-inf")
    ours, theirs = both
    lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    return float(((ours * theirs).sum(axis=1) / np.maximum(lengths, 1e-30)).min())


def largest_difference(
    encoder: Encoder, other: Callable[[Sequence[str]], Any], normalize: bool = False
) -> float:
    """How far `other` (texts -> [n, D]) is from `encoder` on `SENTENCES`: the largest absolute difference of
    a component, relative to the longest vector where that is longer than one.

    inf where the shapes differ or a value is not finite.
    """
    if (both := _both(encoder, other, normalize)) is None:
        return float("inf")
    ours, theirs = both
    # float32 keeps seven digits of a number, so vectors of length 100 cannot agree to 1e-5.
    scale = max(1.0, float(np.linalg.norm(ours, axis=1).max()))
    return float(np.abs(ours - theirs).max()) / scale
