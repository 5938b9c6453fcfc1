"""Encoders as the commands use them: loaded by name, with their settings for encoding fixed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from embedlab.errors import UserError

if TYPE_CHECKING:
    from embedlab.encoders.base import Encoder

DTYPES = ("float32", "bfloat16", "float16")


def load_encoder(
    ckpt: str, max_length: int | None = None, pooling: Mapping[str, Any] | None = None
) -> Encoder:
    """`embedlab.load(ckpt)`, with another `max_length` (what it counts: `embedlab.encoders.tokenization`) where
    given, and read by another pooling, which brings no weights of its own."""
    import embedlab
    from embedlab.encoders.tokenization import Tokenization

    if max_length is not None and (not isinstance(max_length, int) or max_length < 1):
        raise UserError(
            "must be a positive whole number", key="max_length", value=max_length, fix="max_length=128"
        )
    encoder = embedlab.load(str(ckpt))
    if max_length is not None:
        settings = encoder.tokenization.to_dict() | {"max_length": max_length}
        encoder.tokenization = Tokenization.from_dict(encoder.tokenizer, settings)
    if pooling is not None:
        _read_by(encoder, pooling)
    return encoder


def _read_by(encoder: Encoder, pooling: Mapping[str, Any]) -> None:
    from embedlab.encoders.encoder import SentenceEncoder
    from embedlab.pooling import build_pooling, pooling_config

    if not isinstance(encoder, SentenceEncoder):
        raise UserError(
            "an encoder of two towers is read as it was trained", key="pooling", value=pooling.get("name"),
            fix="leave pooling out",
        )  # fmt: skip
    backbone, config = encoder.backbone, pooling_config(pooling)
    config.check(backbone.info, encoder.tokenization.template, "")
    other = build_pooling(config, backbone.info)
    if any(True for _ in other.parameters()):
        raise UserError(
            "has weights, which this checkpoint does not hold", key="pooling", value=pooling.get("name"),
            fix="a pooling without weights, such as cls, mean, last, last_n or rep1",
        )  # fmt: skip
    encoder.pooling = other.to(encoder.device)
    if other.needs_all_layers:
        backbone.prepare_all_layers()


class Configured:
    """An encoder with batch size and dtype fixed: what the evaluation suites get.

    Its `provenance` is the encoder's own, with the dtype that is really used.
    """

    def __init__(
        self,
        encoder: Encoder,
        batch_size: int | None = None,
        dtype: str | None = None,
        normalize: bool = False,
        progress: bool = False,
    ) -> None:
        self.encoder = encoder
        self.dim = encoder.dim
        self._arguments: dict[str, Any] = {
            "batch_size": batch_size,
            "dtype": dtype,
            "normalize": normalize,
            "show_progress_bar": progress,
        }

    @classmethod
    def of(cls, encoder: Encoder, config: Mapping[str, Any], progress: bool = False) -> Configured:
        """From a command's keys: batch_size, device (the encoder is moved there), dtype, normalize (if it has
        one).

        UserError for a device that is not there or an unknown dtype.
        """
        device, dtype = check_device(config["device"]), check_dtype(config["dtype"])
        return cls(
            encoder.to(device),
            batch_size=check_batch_size(config["batch_size"]),
            dtype=dtype,
            normalize=bool(config.get("normalize", False)),
            progress=progress,
        )

    def encode(self, sentences: Sequence[str]) -> Any:
        """Vectors [n, D], a numpy array."""
        return self.encoder.encode(list(sentences), **self._arguments)

    def provenance(self, sentences: Sequence[str] | None = None) -> dict[str, Any]:
        """The encoder's part of a protocol block."""
        used = self._arguments["dtype"]
        return self.encoder.provenance(sentences) | ({"dtype": used} if used is not None else {})


def check_batch_size(batch_size: int | None) -> int | None:
    """`batch_size` itself; UserError when it is not a positive whole number (or null)."""
    if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
        raise UserError(
            "must be a positive whole number", key="batch_size", value=batch_size, fix="batch_size=64"
        )
    return batch_size


def check_dtype(dtype: str | None) -> str | None:
    """`dtype` itself; UserError when it is none of `DTYPES`."""
    if dtype is not None and dtype not in DTYPES:
        raise UserError("no such dtype", key="dtype", value=dtype, fix=f"one of {', '.join(DTYPES)}")
    return dtype


def check_device(device: str | None) -> str:
    """`device` ("auto" and null: CUDA, else mps, else the CPU); UserError when this machine lacks it."""
    import torch

    if device in (None, "auto"):
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"cannot be used ({reason})", key="device", value=device, fix="device=cpu") from error
    return device
