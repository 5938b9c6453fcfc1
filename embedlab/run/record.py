"""What a run was made with: in `config.yaml`, and in its checkpoints, which no other recipe goes on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from embedlab.config.read import read_values
from embedlab.config.recipe import SAME_RECIPE, differences
from embedlab.errors import UserError
from embedlab.files import whole_file
from embedlab.run.callbacks.checkpoints import read_checkpoint

CONFIG = "config.yaml"
MAY_CHANGE = SAME_RECIPE | {
    "stages",
    "trainer.max_steps",
    "trainer.max_epochs",
    "trainer.accelerator",
    "trainer.devices",
    "trainer.num_nodes",
    "trainer.deterministic",
    "trainer.log_every_n_steps",
    "evaluation.every",
    "step",
    "unpad",
    "backbone.trust_remote_code",
    "data.files",
}
"""Sections and keys with which a run may go on as it began: its length, the machine, how it is watched, how a step is
computed; the caller's permission, which no file keeps; and where the text is, whose content the data compare."""


class Record:
    """The configuration in a run's folder.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / CONFIG
        self._earlier = self.path.read_bytes() if self.path.is_file() else None

    def write(self, values: dict[str, Any]) -> None:
        with whole_file(self.path) as new:
            new.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")

    def put_back(self) -> None:
        """What stood there before `write`, or nothing."""
        if self._earlier is None:
            self.path.unlink(missing_ok=True)
            return
        with whole_file(self.path) as new:
            new.write_bytes(self._earlier)


def check_recipe(checkpoint: Path, values: dict[str, Any]) -> None:
    """Refuse to go on from the checkpoint of another recipe.

    One of before recipes were kept in checkpoints is known by the `config.yaml` beside it, or not at all.

    Raises:
        UserError: naming the key and both values.
    """
    saved = read_checkpoint(checkpoint).recipe
    beside = checkpoint.parent / CONFIG
    if saved is None and beside.is_file():
        saved = read_values(beside)
    if not isinstance(saved, dict):
        return
    for key, was, now in differences(saved, values):
        parts = key.split(".")
        above = {".".join(parts[:n]) for n in range(1, len(parts) + 1)}
        # A key that the record lacks is of a later version.
        if above & MAY_CHANGE or (was is None and not _holds(saved, parts)):
            continue
        was, now = ("null" if value is None else value for value in (was, now))
        raise UserError(
            f"the checkpoint is of another recipe: it was trained with {key}={was}",
            file=checkpoint,
            key=key,
            value=now,
            fix=f"{key}={was} to go on; to begin another recipe with its weights, backbone=local backbone.path=EXPORT",
        )


def _holds(values: Any, parts: list[str]) -> bool:
    for part in parts:
        if not isinstance(values, dict) or part not in values:
            return False
        values = values[part]
    return True
