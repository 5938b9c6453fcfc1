"""The folder of an encoder: `embedlab.json` beside a Hugging Face folder, or beside the folders of several towers."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from embedlab.errors import UserError
from embedlab.version import __version__

CARD = "embedlab.json"
POOLING_WEIGHTS = "pooling.safetensors"
FORMAT = 2
"""Of a file with a usage; without one it is 1, which older versions read."""


@dataclass(frozen=True)
class EncoderFile:
    """What `embedlab.json` says of an encoder beside its weights; plain values.

    Args:
        pooling: its configuration; of several towers, the first one's.
        tokenization: `Tokenization.to_dict`.
        backbone: its architecture and attention kernel.
        card: where the encoder comes from.
        adapter: of weights that are stored without their base: where that is.
        towers: of an encoder of several, the folder of each.
        weights: of the towers' sum.
        usage: `Usage.to_dict`.
    """

    pooling: dict[str, Any]
    tokenization: dict[str, Any]
    backbone: dict[str, Any]
    card: dict[str, Any]
    adapter: dict[str, Any] | None = None
    towers: list[str] | None = None
    weights: list[float] | None = None
    usage: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """The contents of the file."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        sums = {key: values.pop(key) for key in ("towers", "weights")}
        if self.towers is not None:
            del values["adapter"]  # each tower says its own
            values = sums | values
        if not self.usage:
            del values["usage"]
        content = {"format": FORMAT if self.usage else 1, "embedlab": __version__} | values
        return json.dumps(content, indent=2, ensure_ascii=False, default=str) + "\n"

    @classmethod
    def read(cls, folder: Path) -> EncoderFile:
        """The file of an encoder's folder.

        Raises:
            UserError: there is none, it is broken, or it is of a newer format.
        """
        file = folder / CARD
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            if "output" in content and "format" not in content:
                fix = "embedlab.export.onnx.load_onnx(folder), or onnxruntime; and the encoder it was made of for ckpt="
                raise UserError("belongs to an ONNX export, which has no weights to load", file=file, fix=fix)
            if content["format"] > FORMAT:
                raise UserError(
                    f"was written by embedlab {content.get('embedlab')}, and this one is too old to read it",
                    file=file,
                    fix="pip install -U embedlab",
                )
            known = {
                f.name: content[f.name]
                for f in fields(cls)
                if f.name in content or (f.default is MISSING and f.default_factory is MISSING)
            }
            for key in ("pooling", "tokenization", "backbone", *(["usage"] if "usage" in known else [])):
                if not isinstance(known[key], dict):
                    raise TypeError(f"{key} is no mapping")
            return cls(**known)
        except OSError as error:
            raise UserError(
                f"is no encoder: {error.strerror}", file=file, fix="a folder that save wrote"
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"is broken ({error!r})", file=file, fix="another copy of the encoder") from error


def holds_twin(folder: Path) -> bool:
    """Whether a folder is that of an encoder of several towers.

    Raises:
        UserError: its `embedlab.json` is broken, or of a newer format.
    """
    return (folder / CARD).is_file() and EncoderFile.read(folder).towers is not None


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
