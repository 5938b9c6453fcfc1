"""Where the package keeps its configuration, its shipped encoder and its caches; who may read what it writes."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def conf_dir() -> Path:
    """The Hydra configuration: inside an installed package, beside the package in a checkout."""
    for folder in (_PACKAGE / "conf", _PACKAGE.parent / "conf"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"the installation is not complete: no conf folder in or beside {_PACKAGE}")


def assets_dir() -> Path:
    """What is shipped with the package, such as the encoder ``mini``."""
    return _PACKAGE / "assets"


def cache_dir() -> Path:
    """Where token caches and prepared data go; the folder need not exist yet.

    ``$EMBEDLAB_CACHE``, else ``embedlab`` in the user's cache folder.
    """
    if own := os.environ.get("EMBEDLAB_CACHE"):
        return Path(own).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG base directory specification: a relative path is invalid and to be ignored.
    base = Path(shared) if os.path.isabs(shared) else Path.home() / ".cache"
    return base / "embedlab"


def ordinary_mode(path: Path) -> None:
    """Give a file or folder the mode that `open` or `mkdir` would have.

    `tempfile` and safetensors (0.8) make what only its owner may read: nobody else could load it.
    """
    umask = os.umask(0)
    os.umask(umask)
    mode = path.stat().st_mode
    special = stat.S_IMODE(mode) & 0o7000  # a group's folder hands its group on
    path.chmod(special | (0o777 if stat.S_ISDIR(mode) else 0o666) & ~umask)
