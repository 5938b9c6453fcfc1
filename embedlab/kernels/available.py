"""Whether Triton is there for the kernels of this project."""

from __future__ import annotations

import importlib.util
from functools import cache


@cache
def has_triton() -> bool:
    """Whether Triton is installed; looked up once, because a training step asks."""
    return importlib.util.find_spec("triton") is not None
