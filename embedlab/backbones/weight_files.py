"""Why a file of weights is not read: damaged, packed, or with objects in it."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path

DAMAGED = "the file is damaged, cut short or holds no weights"
OBJECTS = "the file holds Python objects or code, which are never loaded"
PACKED = "the file is packed, which torch writes none: a small one could stand for any size"


def packed(path: Path) -> bool:
    """Whether a file of torch's is an archive of compressed or overlapping parts, and holds more than its size."""
    try:
        with zipfile.ZipFile(path) as archive:
            parts = archive.infolist()
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError):
        return False  # torch says what it is instead
    compressed = any(part.compress_type != zipfile.ZIP_STORED for part in parts)
    return compressed or sum(part.file_size for part in parts) > path.stat().st_size


def corruption(error: Exception) -> str | None:
    """Why torch or safetensors could not read a file; None where the error says it well enough itself.

    torch's own text proposes ``weights_only=False``, which runs whatever code a file brings.
    """
    from safetensors import SafetensorError

    text = str(error)
    if "Unsupported global" in text or "Unsupported class" in text or "TorchScript" in text:
        return OBJECTS
    if any(word in text for word in ("PytorchStreamReader", "inline_container", "weights_only")):
        return DAMAGED
    kinds = (SafetensorError, pickle.UnpicklingError, zipfile.BadZipFile, EOFError)
    return DAMAGED if isinstance(error, kinds) else None
