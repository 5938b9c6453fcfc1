"""Where the parts of a row stand: what is around its sentence, and the tokens that a template names."""

from __future__ import annotations

from typing import NamedTuple


class Frame(NamedTuple):
    """How many tokens of every row stand around the sentence."""

    special_before: int
    special_after: int
    before: int
    """Special tokens and template."""
    after: int
    between: int | None = None
    """Between the two copies of the sentence; None: there is one."""


class RowMarks(dict[str, int]):
    """Mark name to its distance from the row's last token (0: the last)."""

    frame: Frame
    """For poolings that leave out special or template tokens."""
