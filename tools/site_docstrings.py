"""For mkdocstrings: sections of this project's docstrings as Google's style has them.

``Returns: the text`` on one line is the house style; griffe reads a section whose text stands below, indented.
"""

from __future__ import annotations

import re
from typing import Any

import griffe


class OneLineSections(griffe.Extension):
    """Moves the text of ``Returns: …`` below it, and writes ``a, b: …`` of ``Args:`` as an entry each."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each object that was read."""
        if obj.docstring is not None:
            obj.docstring.value = google(obj.docstring.value)


def google(text: str) -> str:
    """A docstring in Google's style."""
    text = re.sub(r"^(Returns|Yields): (.+(?:\n(?! *\n|\S).*)*)", _below, text, flags=re.MULTILINE)
    return re.sub(r"^( +)(\w+(?:, \w+)+)(: .*)", _each, text, flags=re.MULTILINE)


def _below(found: re.Match[str]) -> str:
    lines = " ".join(line.strip() for line in found[2].splitlines())
    return f"{found[1]}:\n    {lines}"


def _each(found: re.Match[str]) -> str:
    return "\n".join(f"{found[1]}{name}{found[3]}" for name in found[2].split(", "))
