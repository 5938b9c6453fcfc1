"""What makes a recipe, and how two of them differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

SAME_RECIPE = frozenset(
    ("ckpt_path", "logger", "callbacks", "stages_dir", "evaluation.before", "evaluation.final", "evaluation.last",
     "evaluation.sts_dir", "data.report", "data.processes", "data.cache_dir")
)  # fmt: skip
"""Sections and keys that make no other recipe: how a run is watched, and where its files are."""


def differences(a: Any, b: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted keys at which two nested dictionaries differ, with both values."""
    if isinstance(a, dict) and isinstance(b, dict):
        for name in sorted({*a, *b}):
            yield from differences(a.get(name), b.get(name), f"{key}.{name}" if key else name)
    elif a != b:
        yield key, a, b
