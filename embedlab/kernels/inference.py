"""Embeddings and transformer blocks over packed rows, forward alone, by a copy of the weights.

As `embedlab.kernels.fused_block`, which training uses, but the modules are left as they are: threads, and a training
run, may use them meanwhile. Rows of over 128 tokens are attended to by torch's own kernel for rows of different
lengths, which knows no dropout.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from embedlab.kernels import block_ops, fused_block
from embedlab.kernels.available import SHORT_LONGEST, kernel_options, packed_kernel
from embedlab.kernels.packed_rows import PackedRows
from embedlab.kernels.packing import MODEL_TYPES
from embedlab.kernels.varlen_attention import joined_forward, padded_attention

_HALVES = (torch.bfloat16, torch.float16)
_LONGEST_FP32 = 32  # no tensor core multiplies fp32, and tiles of longer rows do not fit into registers


class Transformer(fused_block.Transformer, Protocol):
    """What is asked of a backbone."""

    attention: str


class _Layer(NamedTuple):
    """A product with a bias, or a norm."""

    weight: Tensor
    bias: Tensor
    eps: float = 0.0


class _Block(NamedTuple):
    heads: int
    scale: float
    joined: _Layer
    output: _Layer
    first_norm: _Layer
    up: _Layer
    down: _Layer
    second_norm: _Layer


def applies(backbone: Transformer, device: torch.device) -> bool:
    """Whether `Weights` of a backbone can run here: on a card with Triton, and with ``attention="sdpa"``.

    Products in bf16 and torch's attention for packed rows need Ampere's generation or a later one.
    """
    if device.type != "cuda" or not kernel_options().fused_block or backbone.attention != "sdpa":
        return False
    if torch.cuda.get_device_capability(device) < (8, 0):
        return False
    return packed_kernel(backbone.model.config, SHORT_LONGEST) and readable(backbone)


def readable(backbone: Transformer) -> bool:
    """Whether embeddings and blocks are of a build that is known here, and nobody else looks at them or runs them."""
    if backbone.model.config.model_type not in MODEL_TYPES or not fused_block.known(backbone):
        return False
    return all(
        fused_block.projections(fused_block.layers(block).attention) is not None for block in backbone.blocks
    )


class Weights:
    """Weights of a backbone as they are now, and the forward pass with them.

    Args:
        backbone: that `readable` is true of.
        dtype: to compute in.
    """

    def __init__(self, backbone: Transformer, dtype: torch.dtype) -> None:
        self.dtype = dtype
        embeddings: Any = backbone.model.embeddings
        kinds = getattr(embeddings, "token_type_embeddings", None)
        self._words, self._places = (
            table.weight.detach().to(dtype)
            for table in (embeddings.word_embeddings, embeddings.position_embeddings)
        )
        self._kind = None if kinds is None else kinds.weight.detach()[0].to(dtype)
        self._norm = _layer(embeddings.LayerNorm, dtype)
        self._blocks = [_block(block, dtype) for block in backbone.blocks]
        self._seed = torch.zeros((), dtype=torch.int64, device=self._words.device)  # nothing is dropped

    @property
    def longest(self) -> int:
        """Tokens of the longest row that can be attended to, and is so at no loss."""
        if not self._words.is_cuda:
            return sys.maxsize
        if self.dtype not in _HALVES:
            return _LONGEST_FP32
        usual = all(b.scale == (len(b.output.weight) // b.heads) ** -0.5 for b in self._blocks)
        return len(self._places) if usual and _torch_varlen() is not None else SHORT_LONGEST

    def states(self, rows: PackedRows, every: bool = False, slot: Tensor | None = None) -> list[Tensor]:
        """Hidden states ``[C, D]``: the last, or the embeddings and those after each block.

        Args:
            rows: of at most `longest` tokens.
            every: all states.
            slot: [R], the only slots of the last state that are wanted, instead of all: ``[R, D]``.
        """
        with torch.autocast(rows.ids.device.type, enabled=False), _on(rows.ids.device):
            outputs = [
                block_ops.embed_norm(
                    rows.ids, rows.positions, self._words, self._places, self._kind, self._norm.weight,
                    self._norm.bias, self._seed, 0.0, self._norm.eps,
                ).y
            ]  # fmt: skip
            for block in self._blocks:
                last = block is self._blocks[-1]
                out = self._run(block, outputs[-1], rows, slot if last else None)
                outputs = [*(outputs if every else ()), out]
        return outputs

    def _run(self, block: _Block, x: Tensor, rows: PackedRows, slot: Tensor | None) -> Tensor:
        joined = linear(x, block.joined.weight, block.joined.bias)
        context = self._attend(joined, block, rows)
        if slot is not None:
            context, x = context[slot], x[slot]
        h = self._add_norm(linear(context, block.output.weight, block.output.bias), x, block.first_norm)
        active = block_ops.gelu(linear(h, block.up.weight, block.up.bias), overwrite=True)
        return self._add_norm(linear(active, block.down.weight, block.down.bias), h, block.second_norm)

    def _add_norm(self, x: Tensor, residual: Tensor, norm: _Layer) -> Tensor:
        return block_ops.add_norm(
            x, residual, norm.weight, norm.bias, self._seed, 0.0, norm.eps, overwrite=True
        ).y

    def _attend(self, joined: Tensor, block: _Block, rows: PackedRows) -> Tensor:
        """Context ``[C, D]`` of queries, keys and values in one, ``[C, 3 D]``."""
        if joined.is_cuda and rows.longest <= SHORT_LONGEST:
            return joined_forward(
                joined, rows.bounds, self._seed, block.heads, rows.longest, block.scale, 0.0
            )
        query, key, value = joined.view(len(joined), 3, block.heads, -1).unbind(1)
        if joined.is_cuda:
            attend = _torch_varlen()
            assert attend is not None
            bounds = rows.bounds
            context: Tensor = attend(query, key, value, bounds, bounds, rows.longest, rows.longest)
            return context.flatten(1)
        query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
        out = padded_attention(query, key, value, rows.bounds, block.scale, 0.0)
        return out[0].transpose(0, 1).flatten(1)


def _layer(module: Any, dtype: torch.dtype) -> _Layer:
    weight, bias = module.weight.detach().to(dtype), module.bias.detach().to(dtype)
    return _Layer(weight, bias, float(getattr(module, "eps", 0.0)))


def _block(block: nn.Module, dtype: torch.dtype) -> _Block:
    parts = fused_block.layers(block)
    three = fused_block.projections(parts.attention)
    assert three is not None
    joined = _Layer(
        torch.cat([p.weight.detach() for p in three]).to(dtype),
        torch.cat([p.bias.detach() for p in three]).to(dtype),
    )
    rest = (parts.output, parts.first_norm, parts.up, parts.down, parts.second_norm)
    heads = len(three[0].weight) // parts.attention.attention_head_size
    return _Block(heads, float(parts.attention.scaling), joined, *(_layer(module, dtype) for module in rest))


@cache
def _torch_varlen() -> Callable[..., Any] | None:
    """torch's attention for rows of different lengths (2.10 and later)."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn  # type: ignore[no-any-return]


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current card, whatever card its tensors are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
