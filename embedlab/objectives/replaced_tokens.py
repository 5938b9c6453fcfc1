"""Telling replaced tokens from original ones (ELECTRA, Clark et al. 2020; DiffCSE, Chuang et al. 2022)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from embedlab.objectives.language_model import IGNORED, Masked
from embedlab.objectives.precision import full_precision, to_fp32


@torch.no_grad()
def fill_masks(input_ids: Tensor, masked: Masked, logits: Tensor) -> Tensor:
    """A generator's samples at the masked positions of a batch.

    Args:
        input_ids: ``[B, L]``, the original ids.
        masked: where to sample.
        logits: ``[P, V]`` of a masked language model at its positions.

    Returns:
        ``[B, L]``: drawn from softmax(logits) where a token was selected, the original elsewhere.
    """
    noise = torch.empty_like(logits, dtype=torch.float32).exponential_().log()
    drawn = (logits.float() - noise).argmax(-1)  # Gumbel's trick
    flat = input_ids.flatten()
    kept = torch.where(masked.labels != IGNORED, drawn, flat[masked.positions])
    return flat.scatter(0, masked.positions, kept).view_as(input_ids)


@full_precision
def replaced_token_loss(logits: Tensor, replaced: Tensor, counted: Tensor) -> Tensor:
    """Cross-entropy of telling which tokens were replaced, in nats, the mean over the counted ones.

    Args:
        logits: ``[B, L, 2]``; the second is "replaced".
        replaced: bool ``[B, L]``.
        counted: ``[B, L]``, 1 at tokens to count.
    """
    each = cross_entropy(to_fp32(logits).flatten(0, 1), replaced.long().flatten(), reduction="none")
    return (each * counted.flatten()).sum() / counted.sum().clamp(min=1)
