"""Masked language modelling (BERT, Devlin et al. 2019, section 3.1)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from embedlab.objectives.precision import full_precision

IGNORED = -100


class Masked(NamedTuple):
    """A corrupted batch and where to predict."""

    input_ids: Tensor
    """``[B, L]`` with masks, random ids and kept ids at the selected positions."""
    positions: Tensor
    """``[P]`` indices into the flattened ``[B * L]`` batch; a fixed number, so that shapes do not vary."""
    labels: Tensor
    """``[P]`` original ids, ``-100`` at the surplus positions."""


def mask_tokens(
    input_ids: Tensor,
    maskable: Tensor,
    mask_id: int,
    vocab_size: int,
    probability: float = 0.15,
    rule: str = "bernoulli",
    generator: torch.Generator | None = None,
) -> Masked:
    """Select ``probability`` of the maskable tokens; 80 % become the mask, 10 % a random id, 10 % stay.

    Args:
        input_ids: ``[B, L]``.
        maskable: ``[B, L]`` bool, False at padding and special tokens (never selected).
        mask_id: id of the mask token.
        vocab_size: random ids are drawn from the whole vocabulary, as in BERT.
        probability: share of tokens to predict.
        rule: ``bernoulli`` (each token on its own) or ``exact`` (``max(1, floor(probability * n))`` of a row's n
            maskable tokens, without replacement).
        generator: random source; the device's default when None (needed inside a CUDA graph).

    Shapes do not depend on the draw: of a Bernoulli draw the first ``probability * n + 6 sd`` positions are kept,
    which cuts one batch in about a thousand million.
    """
    draw = torch.rand(input_ids.shape, device=input_ids.device, generator=generator)
    if rule == "exact":
        order = draw.masked_fill(~maskable, 2.0).argsort(1).argsort(1)
        count = (maskable.sum(1, keepdim=True) * probability).floor().clamp(min=1)
        selected = (order < count) & maskable
        capacity = input_ids.shape[0] * max(1, math.floor(input_ids.shape[1] * probability))
    elif rule == "bernoulli":
        selected = (draw < probability) & maskable
        n = input_ids.numel()
        capacity = min(n, math.ceil(probability * n + 6 * math.sqrt(n * probability * (1 - probability))))
    else:
        raise ValueError(f"rule must be 'bernoulli' or 'exact', not {rule!r}")
    kind = torch.rand(input_ids.shape, device=input_ids.device, generator=generator)
    random_ids = torch.randint(vocab_size, input_ids.shape, device=input_ids.device, generator=generator)
    corrupted = torch.where(selected & (kind < 0.8), torch.full_like(input_ids, mask_id), input_ids)
    corrupted = torch.where(selected & (kind >= 0.9), random_ids, corrupted)
    flat = selected.flatten()
    positions = flat.to(torch.uint8).argsort(descending=True, stable=True)[:capacity]
    labels = torch.where(flat[positions], input_ids.flatten()[positions], IGNORED)
    return Masked(corrupted, positions, labels)


@full_precision
def masked_lm(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy in nats over the labels that are not ``-100``; 0 when there is none.

    Args:
        logits: ``[P, V]``, any float dtype (computed in fp32).
        labels: ``[P]``.
    """
    total = cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")
    return total / (labels != IGNORED).sum().clamp(min=1)
