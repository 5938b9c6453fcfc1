"""One matrix product for query, key and value of a self-attention, in a captured step without padding.

At batch 64 each of the three products has 156 tiles for some 132 multiprocessors: two rounds, the second nearly
empty. The module keeps its three layers; while the step computes, it has their weights as one matrix besides, and
another forward. 4 % of a step on an H200 (benchmarks/README.md); ``EMBEDLAB_KERNELS=fused_qkv=0`` goes without.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from embedlab.kernels.available import has_foreign_hooks, is_transformers, kernel_options
from embedlab.kernels.varlen_attention import VARLEN, varlen_attention_joined

_LAYERS = {
    "BertSelfAttention": ("query", "key", "value"),
    "RobertaSelfAttention": ("query", "key", "value"),
    "XLMRobertaSelfAttention": ("query", "key", "value"),
    "CamembertSelfAttention": ("query", "key", "value"),
    "DistilBertSelfAttention": ("q_lin", "k_lin", "v_lin"),
}
"""By classes of transformers 5.17 to 5.24 that this forward is written for; all others are left alone."""
_OUTPUT = "out_lin"
"""DistilBERT's output projection is part of its attention module, BERT's comes after it."""
_ALIGNED = 16
"""Bytes at which each layer's part begins: the update loads so many at once."""


class _Joined:
    """A forward that reads ``joined_weight`` [3 D, D] and ``joined_bias`` [3 D]; with padding, the class's own."""

    def forward(
        self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        bounds = kwargs.get("cu_seq_lens_q")
        if bounds is None or self.config._attn_implementation != VARLEN:
            return super().forward(hidden_states, attention_mask=attention_mask, **kwargs)  # type: ignore[misc]
        joined = linear(hidden_states, self.joined_weight, self.joined_bias)
        heads = joined.shape[-1] // (3 * self.attention_head_size)
        seed = torch.randint(2**31 - 1, (1,), device=joined.device)
        dropout = float(self.dropout.p) if self.training else 0.0
        out = varlen_attention_joined(
            joined, bounds, seed, heads, kwargs["max_length_q"], float(self.scaling), dropout
        )
        if _OUTPUT in self._modules:
            out = self.out_lin(out)
        return out, None


@cache
def joined_class(of: type[nn.Module]) -> type[nn.Module]:
    """The class with the other forward; another class, so that compiled code knows the two apart."""
    return type(f"Joined{of.__name__}", (_Joined, of), {"__module__": __name__})


def projections(module: nn.Module) -> tuple[nn.Linear, nn.Linear, nn.Linear] | None:
    """The layers of query, key and value of a self-attention of known build in which all tokens see all; else None.

    Each is a product and a bias: adapters, quantisation, parametrisations and hooks do more.
    """
    names = _LAYERS.get(type(module).__name__) if is_transformers(module) else None
    if names is None or getattr(module, "is_decoder", False) or getattr(module, "is_causal", False):
        return None
    query, key, value = (getattr(module, name) for name in names)
    for layer in (query, key, value):
        if type(layer) is not nn.Linear or has_foreign_hooks(layer):
            return None
        if layer.bias is None or layer.weight.shape != query.weight.shape:
            return None
    return query, key, value


def joinable(module: nn.Module, dtype: torch.dtype) -> tuple[nn.Linear, nn.Linear, nn.Linear] | None:
    """The layers of query, key and value of a self-attention whose products can be one; else None.

    Args:
        module: any.
        dtype: that it will compute in.
    """
    layers = projections(module)
    if layers is None or not kernel_options().fused_qkv:
        return None
    parameters = [p for layer in layers for p in (layer.weight, layer.bias)]
    for p in parameters:
        if not p.requires_grad or p.dtype != torch.float32 or p.numel() * dtype.itemsize % _ALIGNED:
            return None
    return layers if len({id(p) for p in parameters}) == 6 else None
