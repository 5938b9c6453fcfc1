"""What the benchmark of decoders' steps counts and draws."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaModel

from benchmarks.decoder_step import (
    HEADS,
    INNER,
    RANK,
    SHARED,
    TEXT,
    WIDTH,
    architecture,
    lengths_of,
    operations,
    sentences,
)
from embedlab.backbones import Backbone
from embedlab.backbones.adapters import adapt
from embedlab.backbones.architecture import describe
from embedlab.config.adapter import AdapterConfig
from embedlab.config.backbone import BackboneConfig


def test_operations_are_those_that_torch_counts() -> None:
    """Of a block whose input has a gradient, as all but the first have; written-out attention computes both halves."""
    model: Any = LlamaModel(
        LlamaConfig(
            vocab_size=8, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=1,
            num_attention_heads=HEADS, num_key_value_heads=SHARED, attn_implementation="eager",
        )
    )  # fmt: skip
    adapt(
        Backbone(model, describe(model.config, False), None, "eager"),
        AdapterConfig(name="lora", r=RANK, dropout=0.0),
        BackboneConfig(source="local", path="."),
    )
    rows, length = 2, 12
    states = torch.randn(rows, length, WIDTH, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        model(inputs_embeds=states).last_hidden_state.sum().backward()
    positions = (
        2 * rows * length * (WIDTH // HEADS)
    )  # the rotation's angles are a product too, in some versions
    other_half = rows * length * 3 * 2 * 2 * WIDTH * length / 2
    found = counter.get_total_flops() - other_half - rows * length * operations(1, length)
    assert 0 <= found <= positions


def test_prompts_are_as_long_as_smollm2s() -> None:
    words, texts = sentences(600)
    lengths = lengths_of(architecture(1, words), texts)
    assert max(lengths) == 48
    assert min(lengths) < 48 - TEXT + 8
    assert 0.17 <= 1 - sum(lengths) / len(lengths) / 48 <= 0.28
