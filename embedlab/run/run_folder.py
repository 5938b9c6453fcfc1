"""A run's folder: what may begin in it, what it was made with, and whether anything is left to do."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import yaml

from embedlab.config.run import SAME_RECIPE, RunConfig, differences
from embedlab.errors import UserError
from embedlab.files import write_whole

log = logging.getLogger(__name__)

LAST = "last.ckpt"
PREVIOUS = "previous.ckpt"
AFTER = "scores.json"
CONFIG = "config.yaml"
_LENGTH_AND_MACHINE = ("trainer.max_steps", "trainer.max_epochs", "trainer.devices", "trainer.num_nodes")
_MAY_CHANGE = SAME_RECIPE.union(_LENGTH_AND_MACHINE, ("stages",))
"""Those with which a run may go on as it began."""


def write_config(path: Path, values: dict[str, Any]) -> None:
    """A resolved configuration as a file."""
    write_whole(path, yaml.safe_dump(values, sort_keys=False))


def check_free(folder: Path, ckpt_path: str | None, key: str) -> None:
    """Refuse to begin a run where one is already: its checkpoints, export and scores would be replaced.

    Args:
        folder: of the run.
        ckpt_path: None, a file, ``last`` or ``auto``; a run that goes on in its own folder may.
        key: that says where the folder is.

    Raises:
        UserError: the folder holds the checkpoint or the scores of a run that would not go on; no such checkpoint.
    """
    if ckpt_path is not None and not isinstance(ckpt_path, str):
        raise UserError("not a path", key="ckpt_path", value=ckpt_path, fix="FILE.ckpt, last or auto")
    found = [name for name in (AFTER, LAST, PREVIOUS) if (folder / name).exists()]
    checkpoints = [name for name in found if name != AFTER]
    if not found or ckpt_path == "last" or (ckpt_path == "auto" and checkpoints):
        return
    if ckpt_path not in (None, "auto"):
        if not Path(ckpt_path).is_file():
            raise UserError(
                "no such checkpoint", key="ckpt_path", value=ckpt_path, fix="FILE.ckpt, last or auto"
            )
        if Path(ckpt_path).resolve().parent == folder.resolve():
            return
    go_on = "ckpt_path=last to go on with it, " if checkpoints else ""
    raise UserError(
        f"this folder holds a run already ({', '.join(found)}), which a new one would replace",
        file=folder,
        key=key,
        fix=f"another {key}, {go_on}or delete the folder",
    )


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
        write_config(self.path, values)

    def put_back(self) -> None:
        """What stood there before `write`."""
        if self._earlier is not None:
            write_whole(self.path, self._earlier)


def finished(config: RunConfig, folder: Path, checkpoint: Path | None) -> dict[str, float] | None:
    """The scores of the run in `folder` when `checkpoint` is its end and it has been scored; None: work is left.

    Raises:
        UserError: the checkpoint has more updates, or more passes over the data, behind it than are asked for.
    """
    if checkpoint is None:
        return None
    import torch  # only here: a folder that is taken is refused without it

    content = torch.load(checkpoint, map_location="meta", weights_only=True, mmap=True)
    step = int(content["global_step"])
    passes = int(content["loops"]["fit_loop"]["epoch_progress"]["current"]["completed"])
    asked = (("max_steps", config.trainer.max_steps, step), ("max_epochs", config.trainer.max_epochs, passes))
    for name, most, done in asked:
        if 0 <= most < done:
            where = f"step {step}" if name == "max_steps" else f"step {step}, after {passes} epochs"
            raise UserError(
                f"nothing is left to train, {checkpoint} is at {where}",
                key=f"trainer.{name}",
                value=most,
                fix=f"trainer.{name}={done} or more, or another hydra.run.dir for a shorter run",
            )
    reached = [f"trainer.{name}={most}" for name, most, done in asked if most == done]
    path = folder / AFTER
    # No file, or one of an earlier step: stopped between its last step and its scores.
    scores = _read(path) if reached else None
    if scores is None or scores["training"]["steps"] != step:
        return None
    log.info(
        "Finished: %s is at step %d, the end by %s; %s stays as it is. To train on, raise %s; to score again, "
        "embedlab evaluate ckpt=%s.",
        checkpoint, step, " and ".join(reached), path, " and ".join(r.split("=")[0] for r in reached), folder,
    )  # fmt: skip
    found: dict[str, float] = scores["scores"]
    return found


def _read(path: Path) -> dict[str, Any] | None:
    """The scores of a run; None: no such file, or another's, which the run may replace."""
    try:
        scores = json.loads(path.read_text(encoding="utf-8"))
        whole = isinstance(scores["scores"], dict) and isinstance(scores["training"]["steps"], int)
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return scores if whole else None
