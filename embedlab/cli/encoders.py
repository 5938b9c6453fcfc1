"""Encoders as the commands use them: loaded by name, with their settings for encoding fixed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from embedlab.cli.imports import first_import
from embedlab.encoders.place import Place, anywhere, box, find, local
from embedlab.errors import UserError, one_of
from embedlab.files import SENTENCE_ENCODER

if TYPE_CHECKING:
    from embedlab.encoders.base import Encoder
    from embedlab.encoders.tokenization import Tokenization
    from embedlab.encoders.usage import Usage

DTYPES = ("float32", "bfloat16", "float16")


notices: list[str] = []
"""What standard error is told when the command has ended well: a refusal is one line."""


def named(ckpt: str | None) -> str:
    """`ckpt`, or where it is null the encoder in the box, of which standard error is told."""
    if ckpt is not None:
        return str(ckpt)
    notices.append(f"embedlab: ckpt={SENTENCE_ENCODER}, the encoder in the box")
    return box()


def placed(ckpt: Any, key: str = "ckpt") -> Place | str:
    """What `load_encoder` takes: where the encoder is that `key` names, or its name on a hub, of which nothing is
    downloaded yet.

    UserError for a path at which no encoder is."""
    try:
        return local(str(ckpt)) or str(ckpt)
    except UserError as error:
        error.key = key if error.key == "ckpt" else error.key
        raise


def check_encoding(config: Mapping[str, Any]) -> None:
    """UserError for a dtype that is unknown or a device that is not there; torch is loaded for a named device only."""
    dtype, device = config["dtype"], config["device"]
    if dtype is not None and dtype not in DTYPES:
        raise UserError("no such dtype", key="dtype", value=dtype, fix=one_of(dtype, DTYPES))
    if device not in (None, "auto", "cpu"):
        check_device(device)


def load_encoder(
    ckpt: str | Place,
    max_length: int | None = None,
    pooling: Mapping[str, Any] | None = None,
    dim: int | None = None,
) -> Encoder:
    """What `embedlab.load` gives, with another `max_length` (what it counts: `embedlab.encoders.tokenization`) where
    given, read by another pooling, which brings no weights of its own, and cut to its first `dim` features, which
    its fingerprint, protocol and exports then say."""
    found = ckpt if isinstance(ckpt, Place) else find(str(ckpt))
    with first_import("embedlab.encoders.loading"):
        from embedlab.encoders.loading import read
        from embedlab.encoders.tokenization import Tokenization

    encoder = read(found)
    if max_length is not None:
        settings = encoder.tokenization.to_dict() | {"max_length": max_length}
        encoder.tokenization = Tokenization.from_dict(encoder.tokenizer, settings)
    if pooling is not None:
        _read_by(encoder, pooling)
    if dim is not None:
        cut(encoder, dim)
    return encoder


def cut(encoder: Encoder, dim: int) -> None:
    """Keep the first `dim` features of an encoder's vectors; UserError where there are fewer."""
    if encoder.kept_width(dim) < encoder.dim:
        encoder.usage = replace(encoder.usage, truncate_dim=dim)


def reference(encoder: Encoder, ckpt: str) -> str:
    """`ckpt` so that it means the same in another working folder, and on a hub that goes on."""
    return anywhere(ckpt, encoder.card.get("hub"))


def _read_by(encoder: Encoder, pooling: Mapping[str, Any]) -> None:
    from embedlab.encoders.encoder import SentenceEncoder
    from embedlab.pooling import pooling_config

    if not isinstance(encoder, SentenceEncoder):
        raise UserError(
            "an encoder of two towers is read as it was trained", key="pooling", value=pooling.get("name"),
            fix="leave pooling out",
        )  # fmt: skip
    encoder.read_by(pooling_config(pooling))


@dataclass(frozen=True)
class Configured:
    """An encoder with its settings for encoding fixed: what the evaluation suites get."""

    encoder: Encoder
    arguments: Mapping[str, Any]
    """Of `Encoder.encode`."""

    @classmethod
    def of(cls, encoder: Encoder, config: Mapping[str, Any]) -> Configured:
        """From a command's keys: batch_size, device (the encoder is moved there), dtype, normalize (if it has
        one).

        UserError for a device that is not there, or an unknown dtype.
        """
        check_encoding(config)
        device, dtype = check_device(config["device"]), config["dtype"]
        arguments = {
            "batch_size": config["batch_size"],
            "dtype": dtype,
            "normalize": bool(config.get("normalize", False)),
            "prompt": config.get("prompt"),
            "prompt_name": config.get("prompt_name"),
        }
        encoder.usage.text(arguments["prompt"], arguments["prompt_name"])  # refused before any text is read
        return cls(encoder.to(device), arguments)

    @property
    def dim(self) -> int:
        """Width of the vectors."""
        return self.encoder.dim

    @property
    def tokenization(self) -> Tokenization:
        """The encoder's own."""
        return self.encoder.tokenization

    @property
    def usage(self) -> Usage:
        """The encoder's own prompts."""
        return self.encoder.usage

    def encode(self, sentences: Sequence[str], prompt: str | None = None) -> Any:
        """Vectors [n, D], a numpy array; a `prompt` goes before the settings'."""
        told = {} if prompt is None else {"prompt": prompt, "prompt_name": None}
        return self.encoder.encode(list(sentences), **{**self.arguments, **told})

    def provenance(self, sentences: Sequence[str] | None = None) -> dict[str, Any]:
        """The encoder's part of a protocol block, with the dtype that is really used."""
        stated, dtype = self.encoder.provenance(sentences), self.arguments["dtype"]
        return stated if dtype is None else stated | {"dtype": dtype}


def check_device(device: str | None) -> str:
    """`device` ("auto" and null: CUDA, else mps, else the CPU); UserError when this machine lacks it."""
    import torch

    if device in (None, "auto"):
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.ones(1, device=device).item()  # meta tensors have no values
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"cannot be used ({reason})", key="device", value=device, fix="device=cpu") from error
    return device
