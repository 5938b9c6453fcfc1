"""Packed sequences: one field of a table read as a stream of tokens, cut into rows of one length."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from embedlab.data.table import FieldView, TokenTable
from embedlab.errors import UserError


class PackedTable:
    """A view of a table built for packing: its rows end with the separator and do not begin with [CLS].

    Row i is ``[first] + stream[i * w : (i + 1) * w] + [last]`` with ``w = length - 2``, or a plain piece of
    `length` tokens where the tokenizer has no pair of such tokens (decoders). What is left at the end of the
    stream is left out.

    Args:
        table: built with a frame.
        length: tokens of a row.

    Attributes:
        fields: the one field's `FieldView` (of the stream, not of these rows).
        frame: the ids of first and last, or None.
        width: tokens of the stream in one row.

    Raises:
        UserError: less text than one row.
    """

    def __init__(self, table: TokenTable, length: int) -> None:
        if len(table.fields) != 1:
            raise UserError("only data with one text a row can be packed", key="data.pack", value=length)
        assert table.frame is not None, "the table was not built for packing"
        self.table = table
        self.length = length
        self.fields: dict[str, FieldView] = table.fields
        (self.field,) = table.fields
        first, last = table.frame
        self.frame = None if first is None or last is None else (first, last)
        self.width = length - 2 if self.frame else length
        self.n_rows = len(table.fields[self.field].ids) // self.width
        self.report = table.report
        if self.n_rows == 0:
            raise UserError("there is less text than one packed sequence", key="data.pack", value=length)

    def lengths(self, field: str) -> NDArray[np.int32]:
        return np.full(self.n_rows, self.length, np.int32)

    @cached_property
    def longest(self) -> NDArray[np.int32]:
        return self.lengths(self.field)

    def describe(self, rows: Sequence[int], most: int = 8) -> str:
        """Where the text of packed rows came from: for each, the first row of the source that is in it."""
        offsets = self.table.fields[self.field].offsets
        starts = np.searchsorted(offsets, np.asarray(rows[:most]) * self.width, side="right") - 1
        more = f" and {len(rows) - most} more" if len(rows) > most else ""
        return self.table.describe(starts.tolist(), most) + more
