"""An encoder out of a Lightning checkpoint, which is whole by itself."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from embedlab.errors import UserError
from embedlab.files import corruption

if TYPE_CHECKING:
    from embedlab.encoders.encoder import SentenceEncoder


def encoder_record(encoder: SentenceEncoder) -> dict[str, Any]:
    """What a checkpoint needs beside its weights: configuration, tokenizer and card as texts."""
    texts, weights = encoder.skeleton()
    return {"files": texts, "weights": weights}


def load_encoder(path: Path) -> SentenceEncoder:
    """The encoder of a checkpoint that a run of this project wrote.

    Raises:
        UserError: no checkpoint of this project, or a broken one.
    """
    from safetensors.torch import save_file

    from embedlab.encoders.loading import load

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
                raise UserError(
                    "a file name in the checkpoint leads out of its folder", file=path, value=file
                )
            target.parent.mkdir(parents=True, exist_ok=True)
        for file, text in record["files"].items():
            (folder / file).write_text(text, encoding="utf-8")
        for file, prefix in record["weights"].items():
            start = f"encoder.{prefix}"
            tensors = {k.removeprefix(start): v.clone() for k, v in state.items() if k.startswith(start)}
            save_file(tensors, folder / file, metadata={"format": "pt"})
        return load(folder)
