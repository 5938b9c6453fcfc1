"""The vectors of a set of texts: each distinct text encoded once, looked up by text."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embedlab.encoders.windows import windows
from embedlab.errors import UserError
from embedlab.evaluation.core.correlation import pair_cosine

LONG = 2000
"""Sentences from which on their encoding is worth a progress bar."""
_AT_ONCE = 4096  # rows that arithmetic has copies of


class Encoder(Protocol):
    """All that evaluation asks of an encoder."""

    def encode(self, sentences: list[str], /) -> Any:
        """`n` sentences -> [n, D], a numpy array or a tensor."""
        ...


class Prompted:
    """An encoder with a text before each sentence, in place of its own default prompt.

    Args:
        encoder: any; one without `Encoder.usage` has no prompts of its own.
        role: what the sentences are.
        text: the prompt; None: the encoder's own for this role.
    """

    def __init__(self, encoder: Encoder, role: Literal["query", "document"], text: str | None = None) -> None:
        self.encoder = encoder
        self._usage = getattr(encoder, "usage", None)
        own = self._usage.role(role) if self._usage is not None else ""
        self.text: str = own if text is None else text

    def encode(self, sentences: list[str], **options: Any) -> Any:
        """`encoder.encode` with the prompt."""
        if self._usage is None:
            return self.encoder.encode([self.text + sentence for sentence in sentences])
        return self.encoder.encode(sentences, prompt=self.text, **options)  # type: ignore[call-arg]


def unique(texts: Iterable[str]) -> tuple[list[str], dict[str, int]]:
    """Distinct texts in the order of first appearance, and the position of each."""
    position: dict[str, int] = {}
    for text in texts:
        position.setdefault(text, len(position))
    return list(position), position


def encode(encoder: Encoder, sentences: Sequence[str]) -> Tensor:
    """Vectors of `sentences` as a float32 tensor [n, D] on the CPU, whatever the encoder returns.

    On a terminal, many of them with a progress bar, where the encoder has one. Raises ValueError when the encoder
    does not give one vector a sentence.
    """
    bar = len(sentences) >= LONG and sys.stderr.isatty() and _has_bar(encoder)
    options = {"show_progress_bar": True} if bar else {}
    parts = []
    # All at once where that is bounded, so that batches are of the most similar lengths.
    for window in windows(sentences, rows=None) if sentences else [[]]:
        vectors = encoder.encode(window, **options)
        if not isinstance(vectors, Tensor):
            vectors = torch.from_numpy(np.require(vectors, np.float32, ["C", "W"]))
        vectors = vectors.detach().to("cpu", torch.float32)
        if vectors.ndim != 2 or vectors.shape[0] != len(window):
            raise ValueError(
                f"encode() gave shape {tuple(vectors.shape)} for {len(window)} sentences, expected [n, D]"
            )
        parts.append(vectors)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _has_bar(encoder: Encoder) -> bool:
    try:
        return "show_progress_bar" in inspect.signature(encoder.encode).parameters
    except (TypeError, ValueError):  # a callable that tells nothing
        return False


class Vectors:
    """`Vectors(encoder, texts)` encodes each distinct text once; `take(some_texts)` gives their rows.

    Raises:
        UserError: a vector is not finite, with the first such text. No suite has a meaning for it.
    """

    def __init__(self, encoder: Encoder, texts: Iterable[str]) -> None:
        self.sentences, self._position = unique(texts)
        self.matrix = encode(encoder, self.sentences)
        finite = torch.cat([some.isfinite().all(dim=1) for some in self.matrix.split(_AT_ONCE)])
        if not bool(finite.all()):
            bad = (~finite).nonzero()[:, 0]
            raise UserError(
                f"{len(bad)} of {len(finite)} vectors are not finite, the first for {self.sentences[bad[0]][:60]!r}",
                fix="check the checkpoint (a diverged run?) or encode in float32",
            )

    def rows(self, texts: Sequence[str]) -> NDArray[np.int64]:
        """Row number of each text, [n]."""
        return np.fromiter((self._position[text] for text in texts), dtype=np.int64, count=len(texts))

    def take(self, texts: Sequence[str]) -> Tensor:
        """Rows of `texts`, [n, D]."""
        return self.matrix[torch.from_numpy(self.rows(texts))]

    def cosine(self, first: Sequence[str], second: Sequence[str]) -> Tensor:
        """`pair_cosine` of each text of `first` and the same of `second`, [n] in float64."""
        pieces = [slice(start, start + _AT_ONCE) for start in range(0, len(first), _AT_ONCE)] or [slice(0)]
        return torch.cat([pair_cosine(self.take(first[piece]), self.take(second[piece])) for piece in pieces])


def embed(encoder: Encoder, texts: Sequence[str]) -> Tensor:
    """Vectors [n, D] of `texts`, float32 on the CPU; a text that repeats is encoded once.

    Raises UserError when a vector is not finite, with the text.
    """
    return Vectors(encoder, texts).take(texts)


class SharedVectors:
    """Vectors of several tasks that have texts in common (MR's sentences are phrases of SST-2): `take(task)`
    encodes what no earlier `take` has, and keeps only what a task to come needs.
    """

    def __init__(self, encoder: Encoder, texts: Mapping[str, Sequence[str]]) -> None:
        self._encoder = encoder
        self._waiting = {task: list(some) for task, some in texts.items()}
        self._kept: dict[str, Tensor] = {}

    def take(self, task: str) -> Tensor:
        """Vectors [n, D] of the texts of `task`, as `embed` gives them; once for each task."""
        texts = self._waiting.pop(task)
        distinct = list(dict.fromkeys(texts))
        new = [text for text in distinct if text not in self._kept]
        fresh = dict(zip(new, embed(self._encoder, new), strict=True)) if new else {}
        matrix = torch.stack([fresh[text] if text in fresh else self._kept[text] for text in distinct])
        wanted = {text for some in self._waiting.values() for text in some}
        # Cloned: a row is a view that would keep all the others alive.
        self._kept = {text: v for text, v in self._kept.items() if text in wanted}
        self._kept |= {text: v.clone() for text, v in fresh.items() if text in wanted}
        position = {text: i for i, text in enumerate(distinct)}
        return matrix[torch.tensor([position[text] for text in texts])]
