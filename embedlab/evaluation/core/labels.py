"""Names of labels to numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embedlab.errors import UserError


def numbered(
    labels: Sequence[str], classes: Sequence[str], source: str | Path, key: str = "label"
) -> NDArray[np.int64]:
    """The place of each label in `classes`, [n].

    Raises UserError with the row, in a file with one header line, of a label that is not in `classes`.
    """
    number = {name: i for i, name in enumerate(classes)}
    for row, label in enumerate(labels, start=2):
        if label not in number:
            fix = f"one of {', '.join(classes)}"
            raise UserError("unknown label", file=source, row=row, key=key, value=label, fix=fix)
    return np.array([number[label] for label in labels], dtype=np.int64)
