"""Which decoders with LoRA `fused_decoder` computes: what is not known here is left to PEFT's layers.

It reads weights alone, and runs no module of a block. So a module's class has to say what it does: whatever a
configuration or a user can change of that is looked at.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from embedlab.kernels.available import (
    SHORT_LONGEST,
    has_foreign_hooks,
    has_triton,
    is_transformers,
    kernel_options,
)
from embedlab.kernels.lora import is_plain_lora, share_of

_FAMILIES = ("Llama", "Mistral")
_ROTARY = ("default", "linear", "llama3")
"""Kinds of rotary positions whose frequencies do not follow from a batch."""
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_SILU = ("SiLU", "SiLUActivation")
"""torch's, and that of newer versions of transformers."""
_WIDTHS = (32, 64, 128)
"""Of a head."""


def known(backbone: Any) -> bool:
    """Whether a backbone's blocks are of the build that is known here, and nobody else looks at them or runs them."""
    model = backbone.model
    if not kernel_options().fused_decoder or not has_triton() or backbone.adapter is None:
        return False
    family = type(model).__name__.removesuffix("Model")
    if family not in _FAMILIES or not is_transformers(model) or backbone.position_offset:
        return False
    if backbone.info.kind != "decoder" or any(has_foreign_hooks(m) for m in model.modules()):
        return False
    if not _config_fits(model) or not _norm_fits(model.norm, family):
        return False
    if not all(_block_fits(block, family) for block in model.layers):
        return False
    layers = [layer for block in model.layers for layer in layers_of(block)]
    facts = {(len(x.lora_A["default"].weight), float(x.scaling["default"]), share_of(x)) for x in layers}
    facts_of_attention = {(m.self_attn.head_dim, float(m.self_attn.scaling)) for m in model.layers}
    widths = {x for layer in layers for x in layer.base_layer.weight.shape}
    rank = len(layers[0].lora_A["default"].weight)
    alike = len(facts) == len(facts_of_attention) == 1
    return alike and rank in (16, 32, 64) and all(w % 64 == 0 for w in widths)


def _config_fits(model: Any) -> bool:
    """Whether a model is what its configuration says, and that is known here."""
    config, rotary = model.config, model.rotary_emb
    if getattr(config, "attention_dropout", 0.0) or config.num_hidden_layers != len(model.layers):
        return False
    window = getattr(config, "sliding_window", None)
    if window is not None and window < SHORT_LONGEST:  # a row has no more tokens
        return False
    turned = 2 * rotary.inv_freq.numel() if is_transformers(rotary) else 0
    return getattr(rotary, "rope_type", None) in _ROTARY and turned == model.layers[0].self_attn.head_dim


def _block_fits(block: Any, family: str) -> bool:
    if type(block).__name__ != f"{family}DecoderLayer" or not is_transformers(block):
        return False
    parts = (block.self_attn, "Attention"), (block.mlp, "MLP")
    if any(type(m).__name__ != f"{family}{kind}" or not is_transformers(m) for m, kind in parts):
        return False
    if block.training and getattr(block, "gradient_checkpointing", False):
        return False
    attention = block.self_attn
    if not attention.is_causal or attention.attention_dropout or type(block.mlp.act_fn).__name__ not in _SILU:
        return False
    layers = layers_of(block)
    return (
        all(is_plain_lora(layer) and layer.base_layer.bias is None for layer in layers)
        and all(_fp32(part["default"].weight) for layer in layers for part in (layer.lora_A, layer.lora_B))
        and all(_norm_fits(norm, family) for norm in (block.input_layernorm, block.post_attention_layernorm))
        and attention.head_dim in _WIDTHS
    )


def _norm_fits(norm: Any, family: str) -> bool:
    named = type(norm).__name__ == f"{family}RMSNorm" and is_transformers(norm)
    return named and _fp32(norm.weight) and not norm.weight.requires_grad


def _fp32(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.is_contiguous()


def layers_of(block: Any) -> list[Any]:
    """Those with an update, in the order of `LAYERS`."""
    return [getattr(block.self_attn if i < 4 else block.mlp, name) for i, name in enumerate(LAYERS)]
