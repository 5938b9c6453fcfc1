"""Whether a checkpoint and its configuration are of one model: names, shapes and sizes of the weights."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from embedlab.backbones.resolve import Source
from embedlab.errors import UserError

_FILES = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.h5", "*.msgpack")
_PER_BYTE = 8
"""Weights in a byte of a file at most, with some to spare: the smallest have 1.5 bits."""
_SPARE = 10_000_000
"""Weights that need not be in the file: positions that are worked out, a body that shares its blocks."""
_BUFFERS = ("position_ids", "inv_freq", "masked_bias", "attn.bias", "attention.bias", "token_type_ids")


def check_size(cls: Any, found: Any, source: Source) -> None:
    """Whether the files can hold as many weights as the configuration asks for; nothing is allocated.

    Raises:
        UserError: they cannot.
    """
    folder = Path(source.location)
    files = [folder / source.gguf] if source.gguf else [f for p in _FILES for f in folder.glob(p)]
    size = sum(f.stat().st_size for f in files)
    with torch.device("meta"):
        asked = sum(p.numel() for p in cls(copy.deepcopy(found)).parameters())
    if size and asked > size * _PER_BYTE + _SPARE:
        raise UserError(
            f"its configuration asks for {asked:,} weights, and its files have {size:,} bytes",
            fix="another copy of the model",
        )


def check_report(whole: Any, report: dict[str, Any]) -> list[str]:
    """Whether every weight of a model's body was read, in its shape, and no block was left over.

    Args:
        whole: the model.
        report: of Hugging Face's loader: names that are missing, unexpected, or of another shape.

    Returns:
        Names outside the body (of a head) that the checkpoint lacks.

    Raises:
        UserError: the checkpoint is of another model.
    """
    body = whole.base_model
    gone = ("decoder.", "model.decoder.") if getattr(body, "decoder", body) is None else ()
    for name, stored, ours in sorted(report["mismatched_keys"]):
        if name.startswith(gone):
            continue
        raise UserError(
            f"{name} is {_shape(stored)} in the checkpoint and {_shape(ours)} by its configuration",
            fix="the config.json that belongs to the weights",
        )
    prefix = "" if body is whole else whole.base_model_prefix + "."
    stored = whole.base_model_prefix + "."  # before a body's names where the file has a head
    unread = [n for n in report["unexpected_keys"] if _in_a_block(n.removeprefix(stored), body)]
    if unread:
        raise UserError(
            f"the checkpoint has {len(unread)} weights in its blocks that this configuration does not use, the "
            f"first {min(unread)}",
            fix="the config.json that belongs to the weights (its number of layers)",
        )
    inside = {n for n, _ in body.named_parameters()} | {n for n, _ in body.named_buffers()}
    missing = sorted(
        k for k in report["missing_keys"] if not k.endswith("position_ids") and not k.startswith(gone)
    )
    lacking = [n for n in missing if n.startswith(prefix) and n.removeprefix(prefix) in inside]
    if lacking:
        raise UserError(
            f"the checkpoint lacks {len(lacking)} of the model's weights, the first {lacking[0]}",
            fix="a complete checkpoint of this architecture",
        )
    return missing


def _in_a_block(name: str, body: Any) -> bool:
    """Whether a tensor would stand in a block: in one more than there are, or as a further part of one."""
    if name.endswith(_BUFFERS):
        return False
    owners = {_any_block(n) for n, _ in body.named_modules() if re.search(r"\.\d+(\.|$)", f".{n}")}
    parts = _any_block(name).split(".")
    return any(".".join(parts[:i]) in owners for i in range(1, len(parts)))


def _any_block(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", name)


def _shape(size: Iterable[int]) -> str:
    return "x".join(str(n) for n in size)
