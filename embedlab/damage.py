"""What is wrong with a file of weights, in words that do not advise to run what it holds."""

from __future__ import annotations

import pickle
import zipfile

DAMAGED = "the file is damaged, cut short or holds no weights"
OBJECTS = "the file holds Python objects or code, which are never loaded"


def damage(error: Exception) -> str | None:
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
