"""Whether a folder is, or may become, a search index; said without torch."""

from __future__ import annotations

from pathlib import Path

from embedlab.errors import UserError
from embedlab.files import check_replaceable

INFO = "index.json"


def check_index(folder: Path) -> None:
    """UserError where there is no index."""
    if folder.is_file():
        raise UserError("is a file", file=folder, fix="name the folder of an index")
    if not (folder / INFO).is_file():
        fix = f"embedlab search index TEXTS {folder} ckpt=…"
        raise UserError("is no search index", file=folder, fix=fix)


def check_index_folder(folder: Path, overwrite: bool) -> None:
    """UserError where no index may be written."""
    check_replaceable(folder, (INFO,), "a search index", overwrite)
