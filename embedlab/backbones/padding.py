"""Padded batches for architectures that position ids and a mask are not enough for."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

States = Callable[[Tensor, Tensor | None, Tensor | None, bool], tuple[Tensor, ...]]
"""Ids [B, L], mask, position ids and whether all layers are wanted, to hidden states [B, L, D]."""


def filled_on_the_right(
    states: States, input_ids: Tensor, mask: Tensor, all_layers: bool
) -> tuple[Tensor, ...]:
    """Hidden states of rows whose padding is moved behind their tokens, at the places where the tokens were.

    For models that count positions by places: learned ones without ids (BART), distances from the start (BLOOM),
    states that run along the row (Mamba).
    """
    order = _tokens_first(mask)
    back = order.argsort(1)[..., None]
    found = states(input_ids.gather(1, order), mask.gather(1, order), None, all_layers)
    return tuple(h.gather(1, back.expand_as(h)) for h in found)


def by_length(states: States, input_ids: Tensor, mask: Tensor, all_layers: bool) -> tuple[Tensor, ...]:
    """Hidden states of rows computed without padding, those of one length together; 0 at padding."""
    lengths, order = mask.sum(1), _tokens_first(mask)
    out: tuple[Tensor, ...] | None = None
    for length in lengths.unique().tolist():
        rows = (lengths == length).nonzero()
        cells = order[rows[:, 0], :length]
        ids = input_ids[rows, cells]
        found = states(ids, torch.ones_like(ids), None, all_layers)
        if out is None:
            out = tuple(h.new_zeros(*input_ids.shape, h.shape[-1]) for h in found)
        out = tuple(o.index_put((rows, cells), h) for o, h in zip(out, found, strict=True))
    assert out is not None
    return out


def _tokens_first(mask: Tensor) -> Tensor:
    """The places of each row [B, L], those of tokens before those of padding."""
    return (mask == 0).to(torch.int8).argsort(dim=1, stable=True)


def special_types(model_type: str, input_ids: Tensor, mask: Tensor | None) -> Tensor | None:
    """Token type ids [B, L] where the model was trained with one of its own for [CLS]; None: the model's default.

    XLNet (arXiv 1906.08237) has it last; its tokenizer says 2 there, and 0 elsewhere.
    """
    if model_type != "xlnet":
        return None
    real = torch.ones_like(input_ids) if mask is None else mask.long()
    seen = real.cumsum(1)
    return torch.where((seen == seen[:, -1:]) & (real == 1), 2, 0)
