"""A run's folder: what may begin in it, and what it was made with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from embedlab.errors import UserError
from embedlab.files import whole_file, write_whole

LAST = "last.ckpt"
PREVIOUS = "previous.ckpt"
AFTER = "scores.json"
CONFIG = "config.yaml"


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
        self._earlier = self.path.read_bytes() if self.path.is_file() else None

    def write(self, values: dict[str, Any]) -> None:
        write_config(self.path, values)

    def put_back(self) -> None:
        """What stood there before `write`, or nothing."""
        if self._earlier is None:
            self.path.unlink(missing_ok=True)
            return
        with whole_file(self.path) as new:
            new.write_bytes(self._earlier)
