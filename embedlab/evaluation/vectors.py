"""The vectors of a set of texts: each distinct text encoded once, looked up by text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Encoder(Protocol):
    """All that evaluation asks of an encoder."""

    def encode(self, sentences: list[str], /) -> Any:
        """`n` sentences -> [n, D], a numpy array or a tensor."""
        ...


def unique(texts: Iterable[str]) -> tuple[list[str], dict[str, int]]:
    """Distinct texts in the order of first appearance, and the position of each."""
    position: dict[str, int] = {}
    for text in texts:
        position.setdefault(text, len(position))
    return list(position), position


def encode(encoder: Encoder, sentences: Sequence[str]) -> Tensor:
    """Vectors of `sentences` as a float32 tensor [n, D] on the CPU, whatever the encoder returns.

    Raises ValueError when the encoder does not give one vector a sentence.
    """
    vectors = encoder.encode(list(sentences))
    if not isinstance(vectors, Tensor):
        vectors = torch.from_numpy(np.array(vectors, dtype=np.float32))
    vectors = vectors.detach().to("cpu", torch.float32)
    if vectors.ndim != 2 or vectors.shape[0] != len(sentences):
        raise ValueError(
            f"encode() gave shape {tuple(vectors.shape)} for {len(sentences)} sentences, expected [n, D]"
        )
    return vectors


class Vectors:
    """`Vectors(encoder, texts)` encodes each distinct text once; `take(some_texts)` gives their rows."""

    def __init__(self, encoder: Encoder, texts: Iterable[str]) -> None:
        self.sentences, self._position = unique(texts)
        self.matrix = encode(encoder, self.sentences)

    @property
    def non_finite(self) -> int:
        """How many vectors hold a NaN or an infinity."""
        return int((~self.matrix.isfinite()).any(dim=1).sum())

    def rows(self, texts: Sequence[str]) -> NDArray[np.int64]:
        """Row number of each text, [n]."""
        return np.fromiter((self._position[text] for text in texts), dtype=np.int64, count=len(texts))

    def take(self, texts: Sequence[str]) -> Tensor:
        """Rows of `texts`, [n, D]."""
        return self.matrix[torch.from_numpy(self.rows(texts))]
