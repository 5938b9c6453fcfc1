"""The public evaluation data, where a checkout has them beside it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def needs_data(kind: str) -> Path:
    """Folder `kind` of $EMBEDLAB_DATA, else of ../shared/data; skips the test where it is not there."""
    root = Path(os.environ.get("EMBEDLAB_DATA", Path(__file__).parents[3] / "shared" / "data"))
    if not (root / kind).is_dir():
        pytest.skip(f"no {root / kind} (EMBEDLAB_DATA names the folder of the evaluation data)")
    return root / kind
