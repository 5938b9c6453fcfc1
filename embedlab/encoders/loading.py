"""`embedlab.load`: an encoder from whatever names one."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from embedlab.backbones import load_backbone
from embedlab.backbones.architecture import is_encoder_decoder
from embedlab.backbones.resolve import read_config, resolve
from embedlab.backbones.weight_files import PACKED, corruption, packed
from embedlab.config.backbone import BackboneConfig
from embedlab.config.read import record
from embedlab.encoders.base import Encoder
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.encoders.folder import CARD, EncoderFile
from embedlab.encoders.modules_file import ModulesFile
from embedlab.encoders.place import Place, find
from embedlab.encoders.text_normalization import lower_case
from embedlab.encoders.tokenization import Tokenization
from embedlab.encoders.twin import TwinEncoder
from embedlab.encoders.usage import DOCUMENT, Usage
from embedlab.errors import UserError
from embedlab.files import scratch_folder
from embedlab.pooling import build_pooling

log = logging.getLogger(__name__)

_ENCODERS_THERE = ("longt5", "mt5", "switch_transformers", "t5", "t5gemma", "umt5")
"""Encoder-decoders of which sentence-transformers 6 too takes the encoder, and keeps its weights' names."""


def load(
    path: str | os.PathLike[str] | None = None, revision: str | None = None, trust_remote_code: bool = False
) -> Encoder:
    """An encoder, in evaluation mode.

    Args:
        path: one that is shipped with the package, ``mini-sentence`` (None) or ``mini`` (a folder of that name
            goes before it); the folder of an encoder; that of a run (its ``export``, else its ``best``); a Lightning
            checkpoint; a folder of sentence-transformers, or a plain Hugging Face one (mean pooling, with a warning);
            or the name of such a model on the hub, ``ORG/NAME`` or ``ORG/NAME@REVISION``, which is read as its folder.
        revision: on the hub: a branch, tag or commit.
        trust_remote_code: run Python code that comes with a model of an architecture that transformers lacks.

    Raises:
        UserError: nothing of the kind is there, or a setting of it is not known here.
    """
    return read(find(path, revision, trust_remote_code), trust_remote_code)


def read(place: Place, trust_remote_code: bool = False) -> Encoder:
    """The encoder that is at a place; what is raised is said at `load`."""
    path, name = place.path, place.name
    if place.within is not None and path.suffix == ".ckpt":
        log.warning("%s has neither export/ nor best/: taking %s.", place.within, path.name)
    elif place.within is not None:
        log.info("%s: taking %s/.", place.within, path.name)
    try:
        if path.suffix == ".ckpt" and not path.is_dir():
            encoder = load_checkpoint(path, trust_remote_code)
        elif (path / CARD).is_file():
            encoder = _encoder(path, trust_remote_code)
        elif (path / "modules.json").is_file():
            encoder = _of_modules(path, name, trust_remote_code)
        else:
            encoder = _plain(path, name, trust_remote_code)
    except UserError as error:
        if error.key in ("backbone.path", "backbone.name"):  # what the caller did not set
            error.key, error.value = "ckpt", place.asked
        raise
    if place.hub is not None:
        encoder.card = encoder.card | {"hub": place.hub}
    return encoder


def _encoder(folder: Path, code: bool) -> Encoder:
    several = EncoderFile.read(folder).towers is not None
    try:
        return (TwinEncoder if several else SentenceEncoder).load(folder, trust_remote_code=code)
    except UserError as error:
        error.file = error.file or str(folder / CARD)
        raise


def _plain(path: Path, name: str, code: bool) -> SentenceEncoder:
    """A Hugging Face model without a pooling of its own."""
    backbone, tokenizer = load_backbone(BackboneConfig("local", name, str(path), trust_remote_code=code))
    log.warning("%s says nothing of its pooling: taking the mean over its tokens.", name)
    pooling = build_pooling("mean", backbone.info)
    return SentenceEncoder(backbone, pooling, Tokenization(tokenizer), {"source": name}).eval()


def _of_modules(path: Path, name: str, code: bool) -> SentenceEncoder:
    """A folder of sentence-transformers."""
    saved = ModulesFile.read(path)
    config = BackboneConfig("local", name, str(saved.transformer), trust_remote_code=code)
    kind = read_config(config, resolve(config))
    if is_encoder_decoder(kind) and kind.model_type not in _ENCODERS_THERE:
        problem = f"sentence-transformers reads the decoder of {kind.model_type}, and embedlab its encoder"
        fix = (
            "sentence-transformers itself; or the transformer's folder without modules.json, for the encoder"
        )
        raise UserError(problem, file=path, key="ckpt", value=name, fix=fix)
    backbone, tokenizer = load_backbone(config)
    pooling = build_pooling(saved.pooling, backbone.info)
    try:
        pooling.load_state_dict(saved.weights)
    except RuntimeError as error:
        text = " ".join(str(error).split())[:300]
        fix = "another copy of the model"
        raise UserError(f"its dense layers do not fit: {text}", file=path, fix=fix) from error
    if saved.lower_case:
        lower_case(tokenizer)
    if saved.truncation_side is not None:
        tokenizer.truncation_side = saved.truncation_side
    limit = saved.max_length
    if limit is not None:  # of the tokenizer's own limit it is the better knowledge; of the model's it is not
        limit = min(limit, backbone.info.max_positions or limit)
        tokenizer.model_max_length = max(limit, tokenizer.model_max_length)
    tokenization = Tokenization(tokenizer, max_length=limit)
    _tell(name, saved.usage)
    return SentenceEncoder(backbone, pooling, tokenization, {"source": name}, saved.usage).eval()


def _tell(name: str, usage: Usage) -> None:
    """What of a model's use may surprise."""
    if usage.similarity != "cosine":
        log.warning(
            "%s was trained for %s similarity; embedlab compares by the cosine.", name, usage.similarity
        )
    unused = [n for n in DOCUMENT[1:] if usage.prompts.get(n)]
    if unused and not usage.role("document"):
        log.warning(
            "%s: documents get no prompt, as in sentence-transformers; prompt_name=%s asks for one.",
            name,
            unused[0],
        )


@dataclass(frozen=True)
class _Kept:
    """The files of an encoder in a checkpoint: name to text, and name to the prefix of its weights' names."""

    files: dict[str, str]
    weights: dict[str, str]


def load_checkpoint(path: Path, trust_remote_code: bool = False) -> Encoder:
    """The encoder of a checkpoint that a run of this project wrote.

    Args:
        path: of the file.
        trust_remote_code: as of `load`.

    Raises:
        UserError: no checkpoint of this project, or a broken one.
    """
    fix = "another copy of it, or a run's last.ckpt, previous.ckpt or folder"
    if packed(path):
        raise UserError(PACKED, file=path, fix=fix)
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        kept, state = checkpoint["embedlab"]["encoder"], dict(checkpoint["state_dict"])
    except Exception as error:
        if (problem := corruption(error)) is None and not isinstance(
            error, OSError | RuntimeError | MemoryError
        ):
            raise UserError("is no checkpoint of embedlab", file=path, fix=fix) from None
        text = problem or (str(error).strip().splitlines() or [repr(error)])[0][:200]
        raise UserError(f"cannot be read: {text}", file=path, fix=fix) from None
    files = record(_Kept, kept, path, "embedlab.encoder")
    if not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in state.items()):
        raise UserError("holds weights that are none", file=path, key="state_dict", fix="another copy of it")
    with scratch_folder() as folder:
        try:
            _unpack(files, state, path, folder)
        # A null character in a name, weights that share their memory.
        except (ValueError, RuntimeError) as error:
            raise UserError(f"cannot be unpacked: {error}", file=path, fix="another copy of it") from error
        try:
            return _encoder(folder, trust_remote_code)
        except UserError as error:  # the temporary folder means nothing to anybody
            told = error.message.replace(f"{folder}/", "").replace(str(folder), "it")
            raise UserError(told, file=path, key=error.key, value=error.value, fix=error.fix) from error


def _unpack(kept: _Kept, state: Mapping[str, Tensor], path: Path, folder: Path) -> None:
    """The files of a checkpoint's encoder, each inside of ``folder``."""
    for file in (*kept.files, *kept.weights):
        target = folder / file
        if not target.resolve().is_relative_to(folder.resolve()):
            problem = "a file name in the checkpoint leads out of its folder"
            raise UserError(f"{problem}: {file}", file=path, fix="a checkpoint that you trust")
        target.parent.mkdir(parents=True, exist_ok=True)
    for file, text in kept.files.items():
        (folder / file).write_text(text, encoding="utf-8")
    for file, prefix in kept.weights.items():
        start = f"encoder.{prefix}"
        tensors = {k.removeprefix(start): v.clone() for k, v in state.items() if k.startswith(start)}
        save_file(tensors, folder / file, metadata={"format": "pt"})
