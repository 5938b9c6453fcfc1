"""Masked (BERT, Devlin et al. 2019, section 3.1) and next-token prediction (GPT, Radford et al. 2018, equation 1)."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from embedlab.objectives.precision import full_precision

IGNORED = -100
Rule = Literal["bernoulli", "exact"]


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
    rule: Rule = "bernoulli",
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
        # In fp64, as `most`: in fp32 .29 of 100 are 29 tokens, of which the last rows' would have no label.
        count = (maskable.sum(1, keepdim=True).double() * probability).floor().clamp(min=1)
        selected = (order < count) & maskable
        most = input_ids.shape[0] * max(1, math.floor(input_ids.shape[1] * probability))
    else:
        selected = (draw < probability) & maskable
        n = input_ids.numel()
        most = min(n, math.ceil(probability * n + 6 * math.sqrt(n * probability * (1 - probability))))
    kind = torch.rand(input_ids.shape, device=input_ids.device, generator=generator)
    random_ids = torch.randint(vocab_size, input_ids.shape, device=input_ids.device, generator=generator)
    corrupted = torch.where(selected & (kind < 0.8), torch.full_like(input_ids, mask_id), input_ids)
    corrupted = torch.where(selected & (kind >= 0.9), random_ids, corrupted)
    flat = selected.flatten()
    positions = flat.to(torch.uint8).argsort(descending=True, stable=True)[:most]
    labels = torch.where(flat[positions], input_ids.flatten()[positions], IGNORED)
    return Masked(corrupted, positions, labels)


@full_precision
def token_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy in nats over the labels that are not ``-100``; 0 when there is none.

    Args:
        logits: ``[..., V]``, any float dtype (computed in fp32).
        labels: ``[...]``: original ids, or of each position the id after it (``next_tokens``).
    """
    total = cross_entropy(
        logits.float().flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return total / (labels != IGNORED).sum().clamp(min=1)


@torch.no_grad()
def token_accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """Share of the labels that are not ``-100`` whose logit is the highest."""
    counted = labels != IGNORED
    hits = (logits.argmax(-1) == labels) & counted
    return hits.sum() / counted.sum().clamp(min=1)


def next_tokens(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """``[B, L]`` of each position the id after it; ``-100`` where this position or the next is padding."""
    labels = torch.full_like(input_ids, IGNORED)
    real = attention_mask[:, :-1].bool() & attention_mask[:, 1:].bool()
    labels[:, :-1] = torch.where(real, input_ids[:, 1:], IGNORED)
    return labels
