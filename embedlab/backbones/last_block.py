"""The last block for one token of each row, where a pooling (CLS, a template's mask) reads no other.

All tokens give keys and values; query, output projection and feed-forward are computed for the token that is read:
of BERT's last block that leaves a sixth of the products (a quarter on a card, where attention is computed for all:
`embedlab.kernels.fused_block.states_in`, which also serves masked language modelling: its masked tokens). The vector is
the same up to rounding. ``EMBEDLAB_KERNELS=last_block=0`` computes all of the block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from embedlab.backbones.blocks import BlockAdapter, BlockContext, Heads, block_adapter
from embedlab.backbones.body import Body
from embedlab.kernels import fused_block
from embedlab.kernels.available import has_foreign_hooks, is_transformers, kernel_options
from embedlab.kernels.packing import MODEL_TYPES, FullRows, Slots
from embedlab.kernels.varlen_attention import Padded

_KERNELS = ("sdpa", "eager")
_MODEL_TYPES = MODEL_TYPES - {"modernbert"}  # whose queries are joined to keys and values


def applies(backbone: Body, device: torch.device, packed: bool) -> bool:
    """Whether the last block of a backbone can run so here, over packed rows or padded ones.

    On a card by the fused blocks alone: nobody has timed the others. Not where somebody looks at the modules (hooks),
    or something else runs them (compilation, checkpointing, shards).
    """
    if torch.compiler.is_compiling() or not kernel_options().last_block:
        return False
    if device.type == "cuda":
        return packed and fused_block.applies(backbone, device)
    model_type = backbone.model.config.model_type
    if backbone.compiled or backbone.attention not in _KERNELS or model_type not in _MODEL_TYPES:
        return False
    block: Any = backbone.blocks[-1]
    for module in (backbone.model, block):
        if not is_transformers(module) or has_foreign_hooks(module):
            return False
    return not (block.training and getattr(block, "gradient_checkpointing", False))


def padded(backbone: Body, input_ids: Tensor, attention_mask: Tensor, position: Tensor) -> Tensor:
    """The last hidden state at ``position`` [B] of each row, ``[B, 1, D]``."""
    parts = block_adapter(backbone, "reading one token")
    last = len(parts.blocks) - 1
    states = parts.embed(input_ids, attention_mask)
    frame = parts.frame(states, attention_mask)
    if last:
        states = parts.run(states, frame, last=last)[-1]
    at = position[:, None, None].expand(-1, 1, states.shape[2])
    read = states.gather(1, at)
    mask = parts.mask(last, frame)
    if mask is not None:
        rows = position[:, None, None, None].expand(-1, mask.shape[1], 1, mask.shape[3])
        mask = mask.expand(len(position), -1, -1, -1).gather(2, rows)
    heads = Heads(parts.query(last, read), *parts.key_value(last, states))
    return parts.finish(last, parts.attend(last, heads, BlockContext({"": mask}, {})), read)


def packed(
    backbone: Body, states: Tensor, slots: Slots | FullRows, position: Tensor, **bounds: Any
) -> Tensor:
    """The last hidden state at ``position`` of each of the packed rows, ``[B, 1, D]``; 0 where there is no token.

    Args:
        backbone: with the attention for packed rows.
        states: before the first block, ``[1, C, D]``.
        slots: of the batch.
        position: [B], in the rows of the padded batch.
        bounds: what the blocks are told of the rows.
    """
    parts = block_adapter(backbone, "reading one token")
    for block in parts.blocks[:-1]:
        states = block(states, None, **bounds)
    slot, real = slots.of(position)
    return zero_where_absent(_one_token(parts, states, slot, slots.bounds), real)


def zero_where_absent(out: Tensor, real: Tensor) -> Tensor:
    """``[B, 1, D]``: `out` [B, D], 0 in rows that have no token there (`real` [B])."""
    return torch.where(real[:, None], out, 0.0)[:, None]


def _one_token(parts: BlockAdapter, states: Tensor, slot: Tensor, bounds: Tensor) -> Tensor:
    """The last block's output ``[B, D]`` in the slots of ``slot`` [B], over keys and values in padded form."""
    last = len(parts.blocks) - 1
    read = states[0, slot][:, None]
    rows, attention = len(slot), parts.attention(last)
    cells = Padded(bounds, states.shape[1])
    key, value = (cells.spread(x)[:rows] for x in parts.key_value(last, states))
    dropout = parts.dropout(last) if attention.training else 0.0
    context = nn.functional.scaled_dot_product_attention(
        parts.query(last, read),
        key,
        value,
        cells.mask(key.dtype)[:rows],
        dropout,
        scale=float(attention.scaling),
    )
    return parts.finish(last, context.transpose(1, 2).flatten(2), read)[:, 0]
