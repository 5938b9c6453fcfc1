"""embedlab: train, score and inspect sentence encoders.

`load` takes a run folder, a checkpoint, a Hugging Face folder or hub id; none: ``mini-sentence``, in the package:

>>> import embedlab
>>> embedlab.load().encode(["a cat", "a dog"]).shape
(2, 256)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from embedlab.version import __version__

if TYPE_CHECKING:
    from embedlab.encoders.encoder import SentenceEncoder
    from embedlab.encoders.loading import load

__all__ = ["SentenceEncoder", "__version__", "load"]

_HOMES = {"SentenceEncoder": "embedlab.encoders.encoder", "load": "embedlab.encoders.loading"}


def __getattr__(name: str) -> Any:
    # Deferred, so that `import embedlab` and `embedlab --help` do not wait for torch and transformers.
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
