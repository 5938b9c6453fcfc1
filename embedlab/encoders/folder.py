"""The folder of an encoder: `embedlab.json` beside a Hugging Face folder, or beside the folders of several towers."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from embedlab.errors import UserError
from embedlab.version import __version__

CARD = "embedlab.json"
POOLING_WEIGHTS = "pooling.safetensors"
FORMAT = 1


def card_text(content: dict[str, Any]) -> str:
    """`embedlab.json` of these contents."""
    card = {"format": FORMAT, "embedlab": __version__} | content
    return json.dumps(card, indent=2, ensure_ascii=False, default=str) + "\n"


def read_card(folder: Path) -> dict[str, Any]:
    """`embedlab.json` of an encoder folder.

    Raises:
        UserError: there is none, it is broken, or it is of a newer format.
    """
    file = folder / CARD
    try:
        card = json.loads(file.read_text(encoding="utf-8"))
        if card["format"] > FORMAT:
            raise UserError(
                f"was written by embedlab {card.get('embedlab')}, and this one is too old to read it",
                file=file,
                fix="pip install -U embedlab",
            )
        wanted = {key: card[key] for key in ("pooling", "tokenization", "backbone", "card")}
        return wanted | {"adapter": card.get("adapter")}
    except OSError as error:
        raise UserError(
            f"is no encoder: {error.strerror}", file=file, fix="a folder that save wrote"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"is broken ({error!r})", file=file, fix="another copy of the encoder") from error


def twin_card(folder: Path) -> dict[str, Any] | None:
    """`embedlab.json` of a folder that holds a twin; None where it holds something else."""
    try:
        card = json.loads((folder / CARD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return card if isinstance(card, dict) and "towers" in card else None


@contextmanager
def whole_folder(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """A fresh folder beside `folder` that takes its place when the block ends well, and is gone otherwise.

    Raises:
        UserError: `folder` is a file, or a folder with other things than an encoder in it.
    """
    target = Path(os.path.abspath(os.path.expanduser(folder)))
    if target.exists() and not target.is_dir():
        raise UserError("is a file", file=target, fix="the name of a folder")
    marks = (CARD, "modules.json", "config.json")
    if target.is_dir() and any(target.iterdir()) and not any((target / m).is_file() for m in marks):
        raise UserError("holds other things than an encoder", file=target, fix="another folder, or empty it")
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    fresh.mkdir()
    try:
        yield fresh
        if target.exists():
            old = fresh.with_name(fresh.name + ".old")
            os.rename(target, old)
            os.rename(fresh, target)
            shutil.rmtree(old)
        else:
            os.rename(fresh, target)
    finally:
        if fresh.exists():
            shutil.rmtree(fresh)
