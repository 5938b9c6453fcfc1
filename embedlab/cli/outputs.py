"""What a command writes: asked for before its work begins."""

from __future__ import annotations

import tempfile
from pathlib import Path

from embedlab.errors import UserError


def check_writable(path: Path, key: str = "out") -> None:
    """UserError, before hours of work, unless the file or folder `path` can be written.

    Folders above it need not exist; none is made here.
    """
    place = next(folder for folder in path.absolute().parents if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=path if path.is_dir() else place):
            pass
    except OSError as error:
        raise UserError(
            f"cannot be written ({place}: {error.strerror})", file=path, key=key, fix="write elsewhere"
        ) from error
