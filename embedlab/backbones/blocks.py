"""An encoder's transformer blocks in parts: projections, attention, and the rest of the block.

For what looks inside a block or joins two of them (cross-attention of twin towers, attention profiles). Each
part calls the block's own sub-modules, so that there is one set of weights and one arithmetic.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from embedlab.backbones.architecture import position_offset
from embedlab.backbones.body import token_positions
from embedlab.errors import UserError

if TYPE_CHECKING:
    from embedlab.backbones.body import Body
    from embedlab.backbones.slots import InSlots


class Heads(NamedTuple):
    """What attention works on, ``[B, H, L, D / H]`` each; positions are already in query and key."""

    query: Tensor
    key: Tensor
    value: Tensor


class BlockContext(NamedTuple):
    """What the blocks of one forward share: the mask of each kind of attention, and rotary positions."""

    masks: dict[str, Any]
    rotary: dict[str, tuple[Tensor, Tensor]]
    bounds: Mapping[str, Any] = {}
    """Of packed rows, for their kernel (`InSlots.bounds`)."""


class BlockAdapter(ABC):
    """The blocks of one backbone; ``m`` counts them from 0.

    Args:
        backbone: an encoder.
    """

    def __init__(self, backbone: Body) -> None:
        self.backbone = backbone
        self.model: Any = backbone.model
        self.blocks: Any = backbone.blocks

    @staticmethod
    @abstractmethod
    def fits(block: nn.Module) -> bool:
        """Whether a block is of this build."""

    def embed(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The states before the first block, ``[B, L, D]``; positions are counted from the mask."""
        positions = token_positions(attention_mask, position_offset(self.model.config))
        return self._projected(self.model.embeddings(input_ids=input_ids, position_ids=positions))

    def embed_packed(self, rows: InSlots) -> Tensor:
        """The states of packed rows before the first block, ``[1, C, D]``."""
        arguments = {}
        if hasattr(self.model.embeddings, "token_type_embeddings"):
            # The model's own are for no more tokens than it has positions.
            arguments["token_type_ids"] = torch.zeros_like(rows.ids)
        return self._projected(
            self.model.embeddings(input_ids=rows.ids, position_ids=rows.positions, **arguments)
        )

    def _projected(self, states: Tensor) -> Tensor:
        project = getattr(self.model, "embeddings_project", None)  # ELECTRA's narrow embeddings
        return states if project is None else project(states)

    def run(
        self, states: Tensor, frame: BlockContext, first: int = 0, last: int | None = None
    ) -> list[Tensor]:
        """Blocks ``first`` up to ``last`` (all): the states after each, without the final norm."""
        found = []
        for m in range(first, len(self.blocks) if last is None else last):
            states = self.layer(m, states, frame)
            found.append(states)
        return found

    def frame(self, states: Tensor, attention_mask: Tensor) -> BlockContext:
        """Masks for a forward over ``states`` [B, L, D] with ``attention_mask`` [B, L]."""
        return BlockContext({"": create_bidirectional_mask(self.model.config, states, attention_mask)}, {})

    def packed_frame(self, states: Tensor, rows: InSlots) -> BlockContext:
        """For a forward over packed rows (`Backbone.packing`), which needs no masks; `states` [1, C, D]."""
        return BlockContext({"": None}, {}, rows.bounds)

    def mask(self, m: int, frame: BlockContext) -> Any:
        """The mask of block m, as the kernel in use wants it."""
        return frame.masks[""]

    @abstractmethod
    def attention(self, m: int) -> Any:
        """The attention module of block m."""

    def query(self, m: int, states: Tensor) -> Tensor:
        """Queries ``[B, H, L, D / H]`` of block m, where positions are no part of them."""
        raise NotImplementedError

    def key_value(self, m: int, states: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, ``[B, H, L, D / H]`` each, of block m, where positions are no part of them."""
        raise NotImplementedError

    def project(self, m: int, states: Tensor, frame: BlockContext) -> Heads:
        """Queries, keys and values of block m from its input ``[B, L, D]``."""
        return Heads(self.query(m, states), *self.key_value(m, states))

    @abstractmethod
    def output(self, m: int, context: Tensor) -> Tensor:
        """The attention's output projection of ``context`` [B, L, D], before dropout and residual."""

    @abstractmethod
    def finish(self, m: int, context: Tensor, states: Tensor) -> Tensor:
        """The block's output from its attention's context ``[B, L, D]`` and its input (the residual)."""

    def layer(self, m: int, states: Tensor, frame: BlockContext) -> Tensor:
        """Block m as a whole."""
        return self.blocks[m](states, self.mask(m, frame), **frame.bounds)

    def last(self, states: Tensor) -> Tensor:
        """What stands after the last block (a final norm, where there is one)."""
        return states

    def attend(self, m: int, heads: Heads, frame: BlockContext) -> Tensor:
        """Context ``[B, L, D]`` of block m by the backbone's own kernel, with dropout in training."""
        module = self.attention(m)
        name = self.model.config._attn_implementation
        kernel = attend_explicitly if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
        context, _ = kernel(
            module,
            *heads,
            self.mask(m, frame),
            dropout=self.dropout(m) if module.training else 0.0,
            scaling=heads.query.shape[-1] ** -0.5,
            **(self.kernel_options(m) | dict(frame.bounds)),
        )
        return context.flatten(2)

    def kernel_options(self, m: int) -> dict[str, Any]:
        return {}

    def dropout(self, m: int) -> float:
        """Attention dropout of block m."""
        return float(self.attention(m).dropout.p)

    def weights(self, m: int, heads: Heads, frame: BlockContext) -> Tensor:
        """The attention weights ``[B, H, L, L]`` of block m in fp32, without dropout; rows are queries."""
        return attention_weights(heads, self.mask(m, frame), heads.query.shape[-1] ** -0.5)


class BertBlocks(BlockAdapter):
    """BERT, RoBERTa, XLM-RoBERTa, ELECTRA and others of the same build."""

    @staticmethod
    def fits(block: nn.Module) -> bool:
        own = getattr(getattr(block, "attention", None), "self", None)
        return all(hasattr(own, name) for name in ("query", "key", "value")) and hasattr(
            block, "intermediate"
        )

    def attention(self, m: int) -> Any:
        return self.blocks[m].attention.self

    def query(self, m: int, states: Tensor) -> Tensor:
        own = self.attention(m)
        return split(own.query(states), own.attention_head_size)

    def key_value(self, m: int, states: Tensor) -> tuple[Tensor, Tensor]:
        own = self.attention(m)
        key, value = (split(p(states), own.attention_head_size) for p in (own.key, own.value))
        return key, value

    def output(self, m: int, context: Tensor) -> Tensor:
        return self.blocks[m].attention.output.dense(context)

    def finish(self, m: int, context: Tensor, states: Tensor) -> Tensor:
        block = self.blocks[m]
        attended = block.attention.output(context, states)
        return block.output(block.intermediate(attended), attended)


class DistilBertBlocks(BlockAdapter):
    @staticmethod
    def fits(block: nn.Module) -> bool:
        return hasattr(getattr(block, "attention", None), "q_lin") and hasattr(block, "sa_layer_norm")

    def attention(self, m: int) -> Any:
        return self.blocks[m].attention

    def query(self, m: int, states: Tensor) -> Tensor:
        own = self.attention(m)
        return split(own.q_lin(states), own.attention_head_size)

    def key_value(self, m: int, states: Tensor) -> tuple[Tensor, Tensor]:
        own = self.attention(m)
        key, value = (split(p(states), own.attention_head_size) for p in (own.k_lin, own.v_lin))
        return key, value

    def output(self, m: int, context: Tensor) -> Tensor:
        return self.attention(m).out_lin(context)

    def finish(self, m: int, context: Tensor, states: Tensor) -> Tensor:
        block = self.blocks[m]
        attended = block.sa_layer_norm(self.output(m, context) + states)
        return block.output_layer_norm(block.ffn(attended) + attended)


class ModernBertBlocks(BlockAdapter):
    """Rotary positions, sliding windows in most blocks, norms before the parts."""

    @staticmethod
    def fits(block: nn.Module) -> bool:
        return hasattr(getattr(block, "attn", None), "Wqkv") and hasattr(block, "attention_type")

    def embed(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model.embeddings(input_ids=input_ids)

    def frame(self, states: Tensor, attention_mask: Tensor) -> BlockContext:
        from transformers.masking_utils import create_bidirectional_sliding_window_mask

        config = self.model.config
        positions = token_positions(attention_mask)
        make = {
            "full_attention": create_bidirectional_mask,
            "sliding_attention": create_bidirectional_sliding_window_mask,
        }
        kinds = sorted(set(config.layer_types))
        return BlockContext(
            {kind: make[kind](config, states, attention_mask) for kind in kinds},
            {kind: self.model.rotary_emb(states, positions, kind) for kind in kinds},
        )

    def embed_packed(self, rows: InSlots) -> Tensor:
        return self.model.embeddings(input_ids=rows.ids)

    def packed_frame(self, states: Tensor, rows: InSlots) -> BlockContext:
        kinds = sorted(set(self.model.config.layer_types))
        rotary = {kind: self.model.rotary_emb(states, rows.positions, kind) for kind in kinds}
        return BlockContext(dict.fromkeys(kinds), rotary, rows.bounds)

    def mask(self, m: int, frame: BlockContext) -> Any:
        return frame.masks[self.blocks[m].attention_type]

    def attention(self, m: int) -> Any:
        return self.blocks[m].attn

    def project(self, m: int, states: Tensor, frame: BlockContext) -> Heads:
        from transformers.models.modernbert.modeling_modernbert import apply_rotary_pos_emb

        block, own = self.blocks[m], self.attention(m)
        packed = own.Wqkv(block.attn_norm(states))
        query, key, value = packed.view(*packed.shape[:-1], 3, -1, own.head_dim).transpose(1, 3).unbind(2)
        query, key = apply_rotary_pos_emb(query, key, *frame.rotary[block.attention_type])
        return Heads(query, key, value)

    def output(self, m: int, context: Tensor) -> Tensor:
        return self.attention(m).Wo(context)

    def finish(self, m: int, context: Tensor, states: Tensor) -> Tensor:
        block, own = self.blocks[m], self.attention(m)
        attended = states + own.out_drop(own.Wo(context))
        return attended + block.mlp(block.mlp_norm(attended))

    def layer(self, m: int, states: Tensor, frame: BlockContext) -> Tensor:
        block = self.blocks[m]
        rotary = frame.rotary[block.attention_type]
        return block(states, attention_mask=self.mask(m, frame), position_embeddings=rotary, **frame.bounds)

    def last(self, states: Tensor) -> Tensor:
        return self.model.final_norm(states)

    def kernel_options(self, m: int) -> dict[str, Any]:
        return {"sliding_window": self.attention(m).sliding_window}

    def dropout(self, m: int) -> float:
        return float(self.attention(m).attention_dropout)


BUILDS: tuple[type[BlockAdapter], ...] = (BertBlocks, DistilBertBlocks, ModernBertBlocks)


def block_adapter(backbone: Body, user: str) -> BlockAdapter:
    """The parts of a backbone's blocks.

    Args:
        backbone: an encoder of a known build.
        user: what wants them, for the message.

    Raises:
        UserError: a decoder, or blocks of another build.
    """
    block = backbone.blocks[0]
    for build in BUILDS:
        if backbone.info.kind == "encoder" and build.fits(block):
            return build(backbone)
    raise UserError(
        f"{user} looks into the blocks of BERT, RoBERTa, XLM-RoBERTa, DistilBERT and ModernBERT encoders",
        key="backbone",
        value=backbone.info.model_type,
        fix="one of these",
    )


def split(x: Tensor, head_size: int) -> Tensor:
    """``[B, L, D]`` to ``[B, H, L, head_size]``."""
    return x.view(*x.shape[:-1], -1, head_size).transpose(1, 2)


def attention_weights(heads: Heads, mask: Tensor | None, scaling: float) -> Tensor:
    """``softmax(Q K^T * scaling + M)`` in fp32, ``[B, H, L, L]``; a boolean mask is True where to look."""
    with torch.autocast(heads.query.device.type, enabled=False):
        scores = heads.query.float() @ heads.key.float().transpose(-1, -2) * scaling
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, float("-inf"))
        elif mask is not None:
            scores = scores + mask.float()
        return scores.softmax(-1)


def attend_explicitly(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float = 1.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Attention with its weights written out (eager, in transformers): context [B, L, H, D / H], weights."""
    weights = attention_weights(Heads(query, key, value), attention_mask, scaling).to(value.dtype)
    dropped = nn.functional.dropout(weights, dropout, training=module.training)
    return (dropped @ value).transpose(1, 2).contiguous(), weights
