"""Fixed text around a sentence."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from embedlab.config.build import Record
from embedlab.errors import UserError

MARKERS = ("mask", "rep1", "rep2")
AGAIN = "again"


class _Piece(NamedTuple):
    """A stretch of template text, or the marker called `marker`."""

    text: str
    marker: str | None = None


@dataclass(frozen=True)
class Template(Record):
    """Fixed text around a sentence, such as ``This sentence of "{sentence}" means {mask}.``

    ``{sentence}`` stands once. After it may stand ``{mask}`` (the tokenizer's mask token, marked) and the
    zero-width marks ``{rep1}`` and ``{rep2}`` (they mark the token that ends just before them), each at most
    once. ``{again}`` is the sentence a second time, with the same tokens (Echo). White space at the ends is dropped.
    Sentences are concatenated, never format-substituted: braces in them are text.

    Args:
        text: the template; None: the sentence alone.
        join: ``ids``: what stands before the sentence, the sentence and what stands after it are tokenised
            apart and their ids concatenated (PromptBERT). ``text``: the strings are concatenated, with the
            sentence cut to its limit, and tokenised as a whole (CSE-SFP, PromptEOL).

    Raises:
        UserError: a template that breaks these rules.
    """

    section = "template"

    text: str
    join: Literal["ids", "text"] = "ids"

    def __post_init__(self) -> None:
        super().__post_init__()

        def refuse(message: str, fix: str) -> None:
            raise UserError(message, key="template.text", value=self.text, fix=fix)

        names = [p.marker for p in self._pieces if p.marker]
        for name in names:
            if name not in ("sentence", AGAIN, *MARKERS):
                known = "the markers are {sentence}, {again}, {mask}, {rep1} and {rep2}"
                refuse(f"unknown marker {{{name}}}", known)
            if names.count(name) > 1:
                refuse(f"{{{name}}} stands more than once", f"keep one {{{name}}}")
        if "sentence" not in names:
            refuse("no place for the sentence", "write {sentence} where it goes")
        if names[0] != "sentence":
            refuse(
                f"{{{names[0]}}} stands before {{sentence}}", "marks are counted from the end: put it after"
            )

        if AGAIN in names[2:]:
            refuse(f"{{{names[1]}}} stands before {{again}}", "marks are counted from the end: put it after")
        if AGAIN in names and self.join != "ids":
            raise UserError(
                "both copies of a sentence have the same tokens only if it is tokenised apart",
                key="template.join",
                value=self.join,
                fix="template.join=ids",
            )

    @cached_property
    def _pieces(self) -> tuple[_Piece, ...]:
        parts = re.split(r"\{(\w+)\}", self.text.strip())
        return tuple(
            _Piece("", part) if i % 2 else _Piece(part) for i, part in enumerate(parts) if i % 2 or part
        )

    @property
    def before(self) -> str:
        """The text before the sentence."""
        return "".join(p.text for p in self._pieces[: self._first])

    @property
    def between(self) -> str | None:
        """The text between a sentence's two copies; None: there is one."""
        if self._at == self._first:
            return None
        return "".join(p.text for p in self._pieces[self._first + 1 : self._at])

    @property
    def after(self) -> tuple[_Piece, ...]:
        """Text and markers after the sentence, the second one where there are two."""
        return self._pieces[self._at + 1 :]

    @property
    def _first(self) -> int:
        return next(i for i, p in enumerate(self._pieces) if p.marker == "sentence")

    @property
    def _at(self) -> int:
        return max(i for i, p in enumerate(self._pieces) if p.marker in ("sentence", AGAIN))

    @property
    def marks(self) -> tuple[str, ...]:
        """The markers that it has besides ``{sentence}``, in order."""
        return tuple(p.marker for p in self.after if p.marker)
