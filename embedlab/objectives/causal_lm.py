"""Next-token prediction (GPT, Radford et al. 2018, equation 1)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from embedlab.objectives.masked_lm import IGNORED
from embedlab.objectives.precision import full_precision


def next_tokens(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """``[B, L]`` of each position the id after it; ``-100`` where this position or the next is padding."""
    labels = torch.full_like(input_ids, IGNORED)
    real = attention_mask[:, :-1].bool() & attention_mask[:, 1:].bool()
    labels[:, :-1] = torch.where(real, input_ids[:, 1:], IGNORED)
    return labels


@full_precision
def causal_lm(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy in nats of the labels that are not ``-100``; 0 when there is none.

    Args:
        logits: ``[B, L, V]``, any float dtype (computed in fp32).
        labels: ``[B, L]``, of each position the id after it (``next_tokens``).
    """
    rows = logits.float().flatten(0, 1)
    total = cross_entropy(rows, labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return total / (labels != IGNORED).sum().clamp(min=1)
