"""`embedlab.load`: an encoder from whatever names one."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from embedlab.backbones import load_backbone
from embedlab.config.backbone import BackboneConfig
from embedlab.encoders.base import Encoder
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.encoders.folder import CARD, EncoderFile
from embedlab.encoders.sentence_transformers import read_modules
from embedlab.encoders.tokenization import Tokenization
from embedlab.encoders.twin import TwinEncoder
from embedlab.errors import UserError
from embedlab.files import assets_dir, corruption
from embedlab.pooling import build_pooling

log = logging.getLogger(__name__)


def load(path: str | os.PathLike[str]) -> Encoder:
    """An encoder, in evaluation mode.

    Args:
        path: ``mini`` (shipped with the package); the folder of an encoder; that of a run (its ``export``,
            else its ``best``); a Lightning checkpoint; a folder of sentence-transformers, or a plain
            Hugging Face one (mean pooling, with a warning); or the name of such a model on the hub.

    Raises:
        UserError: nothing of the kind is there.
    """
    name = os.fspath(path)
    given = Path(name).expanduser()
    if name == "mini" and not given.exists():
        given = _shipped(name)
    if given.is_file():
        return _file(given)
    return _folder(given, name) if given.is_dir() else _hub(name)


def _shipped(name: str) -> Path:
    folder = assets_dir() / name
    if not (folder / CARD).is_file():
        problem, fix = (
            f"this installation ships no encoder {name}",
            "reinstall the package, or give a model folder",
        )
        raise UserError(problem, file=folder, key="ckpt", value=name, fix=fix)
    return folder


def _folder(path: Path, name: str) -> Encoder:
    for folder in (path, path / "export", path / "best"):
        if (folder / CARD).is_file():
            return _encoder(folder)
    if (path / "modules.json").is_file():
        inner, pooling, max_length = read_modules(path)
        return _build("local", inner, pooling, max_length)
    if (path / "config.json").is_file():
        return _plain("local", name)
    if checkpoint := next(iter(sorted(path.glob("*.ckpt"))), None):
        return _file(checkpoint)
    problem = "holds no encoder: no embedlab.json, export/, best/, modules.json, config.json or .ckpt"
    raise UserError(problem, file=path, key="ckpt", value=name, fix="the folder of a run or of a model")


def _encoder(folder: Path) -> Encoder:
    several = EncoderFile.read(folder).towers is not None
    return (TwinEncoder if several else SentenceEncoder).load(folder)


def _hub(name: str) -> Encoder:
    if Path(name).is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        fix = "mini, a run folder, or a model folder"
        raise UserError("no such file or folder", key="ckpt", value=name, fix=fix)
    try:
        return _plain("hub", name)
    except UserError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        problem = f"no such file or folder, and as a hub id: {error.message}"
        fix = "mini, a run folder, or a model folder; for a hub id check its name and the network"
        raise UserError(problem, key="ckpt", value=name, fix=fix) from error


def _file(file: Path) -> Encoder:
    if file.suffix == ".gguf":
        return _plain("local", str(file))
    if file.suffix != ".ckpt":
        fix = "a .ckpt, a .gguf, or a folder"
        raise UserError("is no checkpoint", file=file, key="ckpt", value=str(file), fix=fix)
    return load_checkpoint(file)


def _plain(source: str, name: str) -> SentenceEncoder:
    """A Hugging Face model without a pooling of its own."""
    encoder = _build(source, name, "mean", None)
    log.warning("%s says nothing of its pooling: taking the mean over its tokens.", name)
    return encoder


def _build(source: str, name: str, pooling: str, max_length: int | None) -> SentenceEncoder:
    config = BackboneConfig(source=source, name=name, path=name if source == "local" else None)
    backbone, tokenizer = load_backbone(config)
    limit = tokenizer.model_max_length
    tokenization = Tokenization(tokenizer, max_length=min(max_length, limit) if max_length else None)
    pool = build_pooling(pooling, backbone.info)
    return SentenceEncoder(backbone, pool, tokenization, {"source": name}).eval()


def load_checkpoint(path: Path) -> Encoder:
    """The encoder of a checkpoint that a run of this project wrote.

    Raises:
        UserError: no checkpoint of this project, or a broken one.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        record, state = checkpoint["embedlab"]["encoder"], checkpoint["state_dict"]
    except Exception as error:
        fix = "another copy of it, or a run's last.ckpt, previous.ckpt or folder"
        if (problem := corruption(error)) is None and not isinstance(
            error, OSError | RuntimeError | MemoryError
        ):
            raise UserError("is no checkpoint of embedlab", file=path, fix=fix) from None
        text = problem or (str(error).strip().splitlines() or [repr(error)])[0][:200]
        raise UserError(f"cannot be read: {text}", file=path, fix=fix) from None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in (*record["files"], *record["weights"]):
            target = folder / file
            if not target.resolve().is_relative_to(folder.resolve()):
                problem = "a file name in the checkpoint leads out of its folder"
                raise UserError(problem, file=path, value=file)
            target.parent.mkdir(parents=True, exist_ok=True)
        for file, text in record["files"].items():
            (folder / file).write_text(text, encoding="utf-8")
        for file, prefix in record["weights"].items():
            start = f"encoder.{prefix}"
            tensors = {k.removeprefix(start): v.clone() for k, v in state.items() if k.startswith(start)}
            save_file(tensors, folder / file, metadata={"format": "pt"})
        return _encoder(folder)
