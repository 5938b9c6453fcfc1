"""Which column of a table holds which text."""

from __future__ import annotations

from embedlab.config.data import DataConfig
from embedlab.data.readers import Reader

USUAL: dict[str, tuple[str, ...]] = {
    "sentence": ("sentence", "text"),
    "anchor": ("sent0", "anchor"),
    "positive": ("sent1", "positive"),
    "negative": ("hard_neg", "negative"),
    "premise": ("premise",),
    "hypothesis": ("hypothesis",),
    "label": ("label",),
    "source": ("source", "english"),
    "target": ("target", "non_english"),
}
"""Column names that need no `data.columns`: first this project's own, then those of public data sets
(`princeton-nlp/datasets-for-simcse`, `sentence-transformers/parallel-sentences-*`)."""


def has_columns(reader: Reader, roles: tuple[str, ...], config: DataConfig) -> bool:
    """Whether the table has a column for every role."""
    return all(_column(reader, role, config) is not None for role in roles)


def find_columns(reader: Reader, roles: tuple[str, ...], config: DataConfig) -> list[str]:
    """The column of each role.

    Raises:
        UserError: a role without a column; the message lists the columns that there are.
    """
    found = []
    for role in roles:
        column = _column(reader, role, config)
        if column is None:
            wanted = config.chosen.get(role) or " or ".join(USUAL[role])
            raise reader.error(
                f"no column {wanted} for the {role}; there are: {reader.listed()}",
                key=f"data.columns.{role}",
                value=config.chosen.get(role),
                fix=f"data.columns.{role}=NAME",
            )
        found.append(column)
    return found


def _column(reader: Reader, role: str, config: DataConfig) -> str | None:
    chosen = config.chosen.get(role)
    names = (chosen,) if chosen else USUAL[role]
    if reader.columns is None:
        return names[0]
    return next((name for name in names if name in reader.columns), None)
