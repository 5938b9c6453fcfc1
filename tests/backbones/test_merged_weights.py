"""Adapters added to the weights that they belong to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from embedlab.backbones import Backbone, load_backbone
from embedlab.backbones.adapters import adapt, merged_weights
from embedlab.config.adapter import AdapterConfig
from embedlab.config.backbone import BackboneConfig

LORA = AdapterConfig(name="lora", r=8, alpha=12.0)


def adapted(folder: Path) -> Backbone:
    base = BackboneConfig(source="local", path=str(folder))
    backbone, _ = load_backbone(base)
    adapt(backbone, LORA, base)
    for name, p in backbone.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.3)
    return backbone


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bert"])
def test_what_is_added_is_peft_s_own(tiny: Callable[..., Path], model_type: str) -> None:
    backbone = adapted(tiny(model_type, width=64))
    layers = {n: m for n, m in backbone.model.named_modules() if hasattr(m, "lora_A")}
    found = dict(merged_weights(backbone.model))
    assert layers
    for name, layer in layers.items():
        expected = layer.base_layer.weight + layer.get_delta_weight("default")
        assert torch.equal(found[f"{name}.weight"], expected.detach())


@pytest.mark.gpu
def test_a_card_merges_to_the_last_bit_as_the_cpu(tiny: Callable[..., Path]) -> None:
    """A run scores its encoder there and exports it here; both must have one fingerprint."""
    backbone = adapted(tiny("llama", width=64))
    here = dict(merged_weights(backbone.model))
    there = dict(merged_weights(backbone.to("cuda").model))
    assert [n for n, v in here.items() if not torch.equal(v, there[n])] == []
