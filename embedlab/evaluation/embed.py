"""Vectors for scorers that cannot work with a NaN (classifiers, nearest neighbours)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from embedlab.errors import UserError
from embedlab.evaluation.vectors import Encoder, Vectors


def embed(encoder: Encoder, texts: Sequence[str]) -> Tensor:
    """Vectors [n, D] of `texts`, float32 on the CPU; a text that repeats is encoded once.

    Raises UserError when a vector is not finite, with the text.
    """
    vectors = Vectors(encoder, texts)
    finite = vectors.matrix.isfinite().all(dim=1)
    if not bool(finite.all()):
        text = vectors.sentences[int((~finite).nonzero()[0])]
        raise UserError(
            f"{vectors.non_finite} of {len(finite)} vectors are not finite, the first for {text[:60]!r}",
            fix="check the checkpoint (a diverged run?) or encode in float32",
        )
    return vectors.take(texts)
