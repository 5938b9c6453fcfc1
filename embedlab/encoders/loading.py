"""`embedlab.load`: an encoder from whatever names one."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedlab.errors import UserError
from embedlab.files import assets_dir

if TYPE_CHECKING:
    from embedlab.encoders.encoder import SentenceEncoder

log = logging.getLogger(__name__)

_CARD = "embedlab.json"
_ST_POOLINGS = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
_LEGACY_ST_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
}


def load(path: str | os.PathLike[str]) -> SentenceEncoder:
    """An encoder, in evaluation mode.

    Args:
        path: ``mini`` (shipped with the package); the folder of an encoder; that of a run (its ``export``,
            else its ``best``); a Lightning checkpoint; a folder of sentence-transformers, or a plain
            Hugging Face one (mean pooling, with a warning); or the name of such a model on the hub.

    Raises:
        UserError: nothing of the kind is there.
    """
    from embedlab.encoders.encoder import SentenceEncoder

    name = os.fspath(path)
    place = Path(name).expanduser()
    if name == "mini" and not place.exists():
        return _shipped(name)
    if place.is_file():
        return _file(place)
    if place.is_dir():
        for folder in (place, place / "export", place / "best"):
            if (folder / _CARD).is_file():
                return SentenceEncoder.load(folder)
        if (place / "modules.json").is_file():
            return _sentence_transformers(place)
        if (place / "config.json").is_file():
            return _plain("local", name)
        if found := next(iter(sorted(place.glob("*.ckpt"))), None):
            return _file(found)
        raise UserError(
            "holds no encoder: no embedlab.json, export/, best/, modules.json, config.json or .ckpt",
            file=place,
            key="ckpt",
            value=name,
            fix="the folder of a run or of a model",
        )
    if place.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise UserError(
            "no such file or folder", key="ckpt", value=name, fix="mini, a run folder, or a model folder"
        )
    try:
        return _plain("hub", name)
    except UserError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        raise UserError(
            f"no such file or folder, and as a hub id: {error.message}",
            key="ckpt",
            value=name,
            fix="mini, a run folder, or a model folder; for a hub id check its name and the network",
        ) from error


def _shipped(name: str) -> SentenceEncoder:
    from embedlab.encoders.encoder import SentenceEncoder

    folder = assets_dir() / name
    if not (folder / _CARD).is_file():
        raise UserError(
            f"this installation ships no encoder {name}",
            file=folder,
            key="ckpt",
            value=name,
            fix="reinstall the package, or give a model folder",
        )
    return SentenceEncoder.load(folder)


def _file(file: Path) -> SentenceEncoder:
    if file.suffix == ".gguf":
        return _plain("local", str(file))
    if file.suffix != ".ckpt":
        raise UserError(
            "is no checkpoint", file=file, key="ckpt", value=str(file), fix="a .ckpt, a .gguf, or a folder"
        )
    from embedlab.encoders.checkpoint import load_encoder

    return load_encoder(file)


def _plain(source: str, name: str) -> SentenceEncoder:
    """A Hugging Face model without a pooling of its own."""
    encoder = _build(source, name, "mean", None)
    log.warning("%s says nothing of its pooling: taking the mean over its tokens.", name)
    return encoder


def _build(source: str, name: str, pooling: str, max_length: int | None) -> SentenceEncoder:
    from embedlab.backbones import load_backbone
    from embedlab.config.backbone import BackboneConfig
    from embedlab.encoders.encoder import SentenceEncoder
    from embedlab.encoders.tokenization import Tokenization
    from embedlab.pooling import build_pooling

    config = BackboneConfig(source=source, name=name, path=name if source == "local" else None)
    backbone, tokenizer = load_backbone(config)
    limit = tokenizer.model_max_length
    tokenization = Tokenization(tokenizer, max_length=min(max_length, limit) if max_length else None)
    card = {"source": name}
    return SentenceEncoder(backbone, build_pooling(pooling, backbone.info), tokenization, card).eval()


def _sentence_transformers(folder: Path) -> SentenceEncoder:
    """A folder of sentence-transformers whose modules are those that this project has too.

    A final Normalize is left out: `encode(normalize=True)` does it.
    """
    modules = _read(folder / "modules.json")
    kinds = [str(m["type"]).rpartition(".")[2] for m in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UserError(
            f"its modules {', '.join(kinds)} are not all known here",
            file=folder,
            fix="a model of Transformer, Pooling and Normalize; or sentence-transformers itself",
        )
    pooling = _read(folder / modules[1]["path"] / "config.json")
    modes = [m for key, m in _LEGACY_ST_POOLINGS.items() if pooling.get(key)]
    modes += [m for key in ("pooling_mode_max_tokens", "pooling_mode_mean_sqrt_len_tokens",
                            "pooling_mode_weightedmean_tokens") if (m := key) and pooling.get(key)]  # fmt: skip
    mode = pooling.get("pooling_mode", modes[0] if len(modes) == 1 else modes)
    if not isinstance(mode, str) or mode not in _ST_POOLINGS:
        raise UserError(
            f"its pooling {mode} is not known here", file=folder, fix="one of cls, mean and lasttoken"
        )
    inner = folder / modules[0]["path"]
    settings = (
        _read(inner / "sentence_bert_config.json") if (inner / "sentence_bert_config.json").is_file() else {}
    )
    return _build("local", str(inner), _ST_POOLINGS[mode], settings.get("max_seq_length"))


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot be read: {error}", file=file, fix="another copy of the model") from error
