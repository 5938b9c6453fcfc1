"""Texts in bounded amounts: windows of a stream, and of a long text only what its row can need."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

ROWS = 8192
BYTES = 64 << 20
LONG = 4096
"""Characters: of longer texts only the beginning is tokenised, where that gives the same row."""
LONGEST = 1 << 22
"""Characters of a text that are ever tokenised."""
_MOST_TOKENS = 33  # of a character: U+FDFA becomes so many bytes under NFKC, and a byte is at most a token
_SPLIT = {
    "BertPreTokenizer",
    "ByteLevel",
    "Digits",
    "Metaspace",
    "Punctuation",
    "Split",
    "Whitespace",
    "WhitespaceSplit",
}
_LOCAL = {
    "BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Prepend",
    "Replace", "Strip", "StripAccents",
}  # fmt: skip
_SIDES = ("ab", "Ab", "12", "b2", "жы", "中文", "한국", "é")


def _itself(text: Any) -> str:
    return str(text)


def numbered(windows: Iterable[list[T]]) -> Iterator[tuple[int, list[T]]]:
    """Each window with how many items were before it."""
    before = 0
    for window in windows:
        yield before, window
        before += len(window)


def windows(
    items: Iterable[T],
    rows: int | None = ROWS,
    size: int = BYTES,
    text: Callable[[T], str] = _itself,
    first: int = 1,
) -> Iterator[list[T]]:
    """`items` in lists that are worked on one after the other, so that memory does not grow with their number.

    Args:
        items: read only as far as the next window needs.
        rows: the most items of a window; None: as many as fit.
        size: the most bytes that the texts of a window take in memory; a larger text is a window of its own.
        text: of an item.
        first: the first window has this part of both limits at most, and each one twice that of the one before.
    """
    window: list[T] = []
    held, part = 0, first
    for item in items:
        cost = sys.getsizeof(text(item))
        if window and held + cost > size // part:
            yield window
            window, held, part = [], 0, max(1, part // 2)
        window.append(item)
        held += cost
        if rows is not None and len(window) >= rows // part:
            yield window
            window, held, part = [], 0, max(1, part // 2)
    if window:
        yield window


def head(text: str, size: int) -> str | None:
    """The beginning of `text`, of at most `size` characters, up to a single space between letters or digits.

    None where there is no such space. Only there every tokenizer that `splits_at_spaces` has the same tokens
    before, whatever follows: a space may belong to what stands beside it (line ends to the full stop before).
    """
    end = min(size, len(text))
    while (end := text.rfind(" ", 0, end)) > 0:
        if text[end - 1].isalnum() and text[end + 1 : end + 2].isalnum():
            return text[:end]
    return None


def beginnings(texts: list[str], limit: int, tokenise: Callable[[list[str]], list[list[int]]]) -> list[str]:
    """Each text, of a long one as much as has the same first `limit` tokens and more, where there is such a `head`.

    Args:
        texts: read by a tokenizer that `splits_at_spaces`.
        limit: tokens of a text that are kept.
        tokenise: texts to ids. It may change what stands in a text's last word, as a full stop that it adds there.
    """
    size = max(LONG, 16 * limit)
    found = {i: text for i, text in enumerate(texts) if len(text) <= size}
    while len(found) < len(texts) and size <= LONGEST:
        heads = {i: head(text, size) for i, text in enumerate(texts) if i not in found}
        tried = {i: text for i, text in heads.items() if text is not None}
        for (i, text), ids in zip(tried.items(), tokenise(list(tried.values())), strict=True):
            if len(ids) - _MOST_TOKENS * (len(text) - text.rfind(" ")) > limit:
                found[i] = text
        size *= 8
    return [found.get(i, text) for i, text in enumerate(texts)]


def splits_at_spaces(tokenizer: Any) -> bool:
    """Whether the tokens before a space between letters or digits do not depend on the text after it.

    True of a Hugging Face tokenizer whose normalizers look at no more than a few neighbouring characters and whose
    pre-tokenizer ends a piece there, as the parts that are known here do; False where that is not sure.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.pre_tokenizer is None:
        return False
    normalizers, splitters = _parts(backend.normalizer), _parts(backend.pre_tokenizer)
    if any(" " in token.strip() for token in tokenizer.get_added_vocab()):
        return False
    if (
        not {part["type"] for part in splitters} <= _SPLIT
        or not {part["type"] for part in normalizers} <= _LOCAL
    ):
        return False
    # A replacement that reaches over a space: none is known, but a pattern may say anything.
    patterns = [str(next(iter(p["pattern"].values()))) for p in normalizers if p["type"] == "Replace"]
    if any(p not in (" ", " {2,}", r"\s+", r"\s{2,}") and (" " in p or "\\" in p) for p in patterns):
        return False
    return all(_ends_piece(backend, left, right) for left in _SIDES for right in _SIDES)


def _ends_piece(backend: Any, left: str, right: str) -> bool:
    pieces = [span for _, span in backend.pre_tokenizer.pre_tokenize_str(f"{left} {right}")]
    return all(end <= len(left) + 1 or start >= len(left) for start, end in pieces)


def _parts(part: Any) -> list[dict[str, Any]]:
    """What a normalizer or pre-tokenizer is made of."""

    def flat(state: dict[str, Any]) -> list[dict[str, Any]]:
        inner = state.get("normalizers") or state.get("pretokenizers")
        return [x for one in inner for x in flat(one)] if inner else [state]

    return [] if part is None else flat(json.loads(part.__getstate__()))
