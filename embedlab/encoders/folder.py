"""The folder of an encoder: `embedlab.json` beside a Hugging Face folder, or beside the folders of several towers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from embedlab import files
from embedlab.config.read import read_values, record
from embedlab.errors import UserError
from embedlab.version import __version__

CARD = "embedlab.json"
POOLING_WEIGHTS = "pooling.safetensors"
FORMAT = 3
_COPY = "another copy of the encoder"
"""Of a file with tokenizations; without them it is 2 with a usage and 1 without, which older versions read."""


def same_encoder(one: str, other: str) -> bool:
    """Whether two fingerprints (`Encoder.fingerprint`) are of one encoder. Earlier releases wrote the first hash alone,
    which says nothing of a model's configuration: then it decides."""
    return all(a == b for a, b in zip(one.split("+"), other.split("+"), strict=False))


@dataclass(frozen=True)
class EncoderFile:
    """What `embedlab.json` says of an encoder beside its weights; plain values.

    Args:
        pooling: its configuration; of several towers, the first one's.
        tokenization: `Tokenization.to_dict`.
        backbone: its architecture and attention kernel.
        card: where the encoder comes from.
        adapter: of weights that are stored without their base: where that is.
        towers: of an encoder of several, the folder of each; the same one for towers that share their weights.
        tokenizations: where towers share their weights, `Tokenization.to_dict` of each tower.
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
    tokenizations: list[dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        if self.towers is not None and not 2 <= len(self.towers) == len(self.weights or self.towers):
            told = "two towers or more, and a weight for each"
            raise UserError(told, key="towers", value=len(self.towers), fix=_COPY)
        if self.tokenizations is not None and len(self.tokenizations) != len(self.towers or ()):
            found = len(self.tokenizations)
            raise UserError("one for each tower", key="tokenizations", value=found, fix=_COPY)

    def text(self) -> str:
        """The contents of the file."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        sums = {key: values.pop(key) for key in ("towers", "weights")}
        if self.towers is not None:
            del values["adapter"]  # each tower says its own
            values = sums | values
        if not self.usage:
            del values["usage"]
        if self.tokenizations is None:
            del values["tokenizations"]
        number = FORMAT if self.tokenizations is not None else 2 if self.usage else 1
        content = {"format": number, "embedlab": __version__} | values
        return json.dumps(content, indent=2, ensure_ascii=False, default=str) + "\n"

    @classmethod
    def read(cls, folder: Path) -> EncoderFile:
        """The file of an encoder's folder.

        Raises:
            UserError: there is none, it is broken, or it is of a newer format.
        """
        file = folder / CARD
        if not file.exists():
            raise UserError("is no encoder: no such file", file=file, fix="a folder that save wrote")
        fix = "another copy of the encoder"
        content = read_values(file, fix)
        if isinstance(content, dict) and "output" in content and "format" not in content:
            fix = "embedlab.export.onnx.load_onnx(folder), or onnxruntime; and the encoder it was made of for ckpt="
            raise UserError("belongs to an ONNX export, which has no weights to load", file=file, fix=fix)
        written = record(_Written, content, file, fix=fix)
        if written.format > FORMAT:
            raise UserError(
                f"was written by embedlab {written.embedlab}, and this one is too old to read it",
                file=file,
                fix="pip install -U embedlab",
            )
        saved = record(cls, content, file, fix=fix)
        record(_Card, saved.card, file, "card", fix)
        return saved


@dataclass(frozen=True)
class _Written:
    format: int
    embedlab: str | None = None


@dataclass(frozen=True)
class _Card:
    """What is read by name of a card."""

    name: str | None = None
    hub: str | None = None
    training: dict[str, Any] | None = None
    config: dict[str, Any] | None = None
    scores: dict[str, Any] | None = None
    protocol: dict[str, Any] | None = None
    licence: str | None = None


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
    files.check_replaceable(target, (CARD, "modules.json", "config.json"), "an encoder")
    with files.whole_folder(target) as fresh:
        yield fresh
