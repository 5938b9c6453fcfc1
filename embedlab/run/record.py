"""`config.yaml`: what a run was made with."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

log = logging.getLogger(__name__)

CONFIG = "config.yaml"
SAME_RECIPE = frozenset(
    ("ckpt_path", "logger", "callbacks", "stages_dir", "evaluation.before", "evaluation.final", "evaluation.last",
     "evaluation.sts_dir", "data.report", "data.processes", "data.cache_dir")
)  # fmt: skip
"""Sections and keys that make no other recipe: how a run is watched, and where its files are."""
_LENGTH_AND_MACHINE = ("trainer.max_steps", "trainer.max_epochs", "trainer.devices", "trainer.num_nodes")
_MAY_CHANGE = SAME_RECIPE.union(_LENGTH_AND_MACHINE, ("stages",))
"""Those with which a run may go on as it began."""


class Record:
    """The configuration in a run's folder.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / CONFIG
        self._earlier = self.path.read_text(encoding="utf-8") if self.path.is_file() else None

    def warn_of_changes(self, values: dict[str, Any]) -> None:
        """A line in the log where a run goes on with other settings than it began with."""
        there = yaml.safe_load(self._earlier) if self._earlier is not None else None
        if not isinstance(there, dict):
            return
        old, new = ({k: v for k, v in x.items() if k not in _MAY_CHANGE} for x in (there, values))
        # A key that the record lacks is of a later version.
        changed = [
            f"{key}={now} (was {was})"
            for key, was, now in differences(old, new)
            if was is not None and key not in _MAY_CHANGE
        ]
        if changed:
            log.warning(
                "This run goes on with other settings than it began with, and is neither recipe: %s.",
                ", ".join(changed),
            )

    def write(self, values: dict[str, Any]) -> None:
        self.path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")

    def put_back(self) -> None:
        """What stood there before `write`."""
        if self._earlier is not None:
            self.path.write_text(self._earlier, encoding="utf-8")


def differences(a: Any, b: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted keys at which two nested dictionaries differ, with both values."""
    if isinstance(a, dict) and isinstance(b, dict):
        for name in sorted({*a, *b}):
            yield from differences(a.get(name), b.get(name), f"{key}.{name}" if key else name)
    elif a != b:
        yield key, a, b
