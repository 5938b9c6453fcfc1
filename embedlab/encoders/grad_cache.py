"""Cached gradients (GradCache, Gao et al. 2021): the in-batch loss of a large batch in a small one's memory.

The loss needs all vectors of the batch, but not all activations: rows are encoded in chunks that keep none,
and when the gradient of the loss reaches the vectors, each chunk is encoded once more and back-propagated:
one more forward pass. Random state (CPU and CUDA) and autocast are restored, and so are dropout masks.

Each chunk is one non-reentrant checkpoint, hence there is a single backward pass: loss scaling needs no care,
and a parameter's gradient becomes ready once, as data-parallel reducers want it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

R = TypeVar("R", Tensor, tuple[Tensor, ...])


def cached(encode: Callable[..., R], *rows: Tensor, chunk: int | None) -> R:
    """``encode(*rows)`` by chunks of rows, whose activations are recomputed in the backward pass.

    Args:
        encode: from tensors ``[b, ...]`` to one tensor ``[b, ...]`` or a tuple of them; each row is on its
            own (no batch statistics).
        rows: ``[B, ...]`` each.
        chunk: rows at once. None, or no gradient wanted: one call on all rows.

    Returns:
        What ``encode(*rows)`` returns, ``[B, ...]``. Gradients are those of plain back-propagation through
        the same chunks; without dropout also those of one batch (dropout draws other masks for other shapes).
    """
    if chunk is None or not torch.is_grad_enabled():
        return encode(*rows)
    chunks = zip(*(r.split(chunk) for r in rows), strict=True)
    parts = [checkpoint(encode, *part, use_reentrant=False) for part in chunks]
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)  # type: ignore[return-value]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))  # type: ignore[return-value]
