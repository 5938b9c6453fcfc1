"""`config.yaml`: what a run was made with."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import yaml

from embedlab.config.recipe import SAME_RECIPE, differences

log = logging.getLogger(__name__)

CONFIG = "config.yaml"
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
