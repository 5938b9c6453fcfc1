"""Texts with a label: texts of one label are alike."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from embedlab.config.data import DataConfig
from embedlab.data.kinds import DataKind, RawRow
from embedlab.data.reader import Reader
from embedlab.errors import UserError


class Labelled(DataKind):
    """``data=labelled``. A label is text or a whole number; its id is its place among the sorted ones of all tables."""

    name = "labelled"
    roles = ("text",)
    usual: ClassVar = {"text": ("text", "sentence"), "label": ("label",)}
    numbers: ClassVar = {"label": int}
    keys: ClassVar = {"per_label": "labels"}

    def rows(
        self, readers: Sequence[Reader], roles: tuple[str, ...], config: DataConfig, dropped: Counter[str]
    ) -> Iterator[RawRow]:
        """Texts and the id of their label; the tables are read twice, first for their labels.

        Raises:
            UserError: a label that is neither, or all rows have the same.
        """
        labels = self._labels(readers, config)
        for table, row, (*texts, label), group in super().rows(readers, roles, config, dropped):
            if (name := _plain(label)) is None:
                dropped["no label"] += 1
            else:
                yield table, row, (*texts, labels[name]), group

    def _labels(self, readers: Sequence[Reader], config: DataConfig) -> dict[str, int]:
        names: set[str] = set()
        for reader in readers:
            for row, (label,) in reader.rows(self.find_columns(reader, ("label",), config)):
                if not _is_label(label):
                    told = f"the label {label!r} is neither text nor a whole number"
                    raise reader.error(
                        told, row, fix="a name or a number for each class, or data.columns.label=NAME"
                    )
                if (name := _plain(label)) is not None:
                    names.add(name)
        if len(names) < 2:
            raise UserError(
                f"all rows have one label ({', '.join(names) or 'none'})",
                file=config.source,
                key="data.columns.label",
                value=config.chosen.get("label"),
                fix="texts of at least two labels, or data=sentences",
            )
        return {name: place for place, name in enumerate(sorted(names, key=_order))}


def _is_label(value: Any) -> bool:
    """Whether it is text, a whole number, or nothing; tables of floats have nan for nothing."""
    if isinstance(value, float):
        return value.is_integer() or math.isnan(value)
    return isinstance(value, str | int | None) and not isinstance(value, bool)


def _plain(label: Any) -> str | None:
    """The label as text: 3, 3.0 and "3" are one; None for an empty one."""
    if isinstance(label, float):
        label = None if math.isnan(label) else int(label)
    return None if label is None else str(label).strip() or None


def _order(name: str) -> tuple[bool, int, str]:
    """Whole numbers by their size, before all other labels."""
    # Python reads no number of more than 4,300 digits.
    whole = name.removeprefix("-").isdecimal() and len(name) < 1000
    return not whole, int(name) if whole else 0, name
