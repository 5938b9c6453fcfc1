"""The last block for one token of each row, where a pooling (CLS, a template's mask) reads no other.

All tokens give keys and values; query, output projection and feed-forward are computed for the token that is read:
of BERT's last block that leaves a sixth of the products. The vector is the same up to rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from embedlab.backbones.unpad import MODEL_TYPES, Slots

if TYPE_CHECKING:
    from embedlab.backbones.backbone import Backbone

_KERNELS = ("sdpa", "eager")


def applies(backbone: Backbone, device: torch.device) -> bool:
    """Whether the last block of a backbone can run so here.

    On the CPU alone: on a card training steps are compiled, and nobody has timed the others. Not where somebody looks
    at the modules (hooks), or something else runs them (compilation, checkpointing, shards).
    """
    if device.type != "cpu" or backbone.compiled or torch.compiler.is_compiling():
        return False
    if backbone.attention not in _KERNELS or backbone.model.config.model_type not in MODEL_TYPES:
        return False
    block: Any = backbone.blocks[-1]
    for module in (backbone.model, block):
        if not type(module).__module__.startswith("transformers.models.") or "forward" in vars(module):
            return False
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
            return False
    return not (block.training and getattr(block, "gradient_checkpointing", False))


def padded(backbone: Backbone, input_ids: Tensor, attention_mask: Tensor, position: Tensor) -> Tensor:
    """The last hidden states ``[B, L, D]``: right at ``position`` [B], 0 elsewhere."""
    from embedlab.backbones.parts import Frame, Heads, parts_of

    parts = parts_of(backbone, "reading one token")
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
    out = parts.finish(last, parts.attend(last, heads, Frame({"": mask}, {})), read)
    return out.new_zeros(states.shape).scatter(1, at, out)


def packed(backbone: Backbone, states: Tensor, slots: Slots, position: Tensor, **bounds: Any) -> Tensor:
    """The last hidden states of packed rows ``[1, C, D]``: right in the slots of ``position`` [B], 0 elsewhere.

    Args:
        backbone: with the attention for packed rows.
        states: before the first block, ``[1, C, D]``.
        slots: of the batch.
        position: in the rows of the padded batch.
        bounds: what the blocks are told of the rows.
    """
    from embedlab.backbones.parts import parts_of
    from embedlab.backbones.varlen_attention import Padded

    parts = parts_of(backbone, "reading one token")
    last = len(parts.blocks) - 1
    for block in parts.blocks[:last]:
        states = block(states, None, **bounds)
    slot, real = slots.of(position)
    read = states[0, slot][:, None]
    rows, own = len(slot), parts.attention(last)
    cells = Padded(slots.bounds, states.shape[1])
    key, value = (cells.spread(x)[:rows] for x in parts.key_value(last, states))
    dropout = parts.dropout(last) if own.training else 0.0
    context = nn.functional.scaled_dot_product_attention(
        parts.query(last, read), key, value, cells.mask(key.dtype)[:rows], dropout, scale=float(own.scaling)
    )
    out = parts.finish(last, context.transpose(1, 2).flatten(2), read)[:, 0]
    # Rows without the token meet in one slot more, which is cut off.
    place = torch.where(real, slot, states.shape[1])
    return out.new_zeros(states.shape[1] + 1, out.shape[-1]).index_copy(0, place, out)[None, :-1]
