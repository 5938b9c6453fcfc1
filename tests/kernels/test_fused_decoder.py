"""Written-out blocks of a decoder with LoRA: values, gradients and masks against PEFT's layers; what is left alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from embedlab.backbones import Backbone
from embedlab.backbones.adapters import adapt
from embedlab.backbones.architecture import describe
from embedlab.config.adapter import AdapterConfig
from embedlab.config.backbone import BackboneConfig
from embedlab.kernels import fused_decoder
from embedlab.kernels.fused_decoder import DecoderWeights
from tests.interpreted import DEVICE, NEEDS

BASE = BackboneConfig(source="local", path=".")
SHAPES = [
    # heads, shared, width of a head, inner, rank, lengths, slots
    (4, 2, 32, 128, 16, (12, 5, 1, 7), 40),
    (2, 2, 32, 64, 16, (3, 20), 23),
    (1, 1, 64, 192, 32, (1, 6), 70),
]
ids_of_shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[2]}-{s[4]}-{s[6]}")


def decoder(shape: Any, dropout: float = 0.0, family: str = "Llama", **more: Any) -> Backbone:
    """Two blocks whose updates are no longer zero."""
    import transformers

    heads, shared, width, inner, rank, *_ = shape
    config = getattr(transformers, f"{family}Config")(
        vocab_size=50, hidden_size=64, intermediate_size=inner, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=shared, head_dim=width, max_position_embeddings=64, pad_token_id=0, **more,
    )  # fmt: skip
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}Model")(config)
    backbone = Backbone(model, describe(model.config, False), None, "sdpa")
    adapt(backbone, AdapterConfig(name="lora", r=rank, alpha=rank / 2, dropout=dropout), BASE)
    for name, p in backbone.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)
        elif "norm" in name:
            nn.init.uniform_(p, 0.5, 1.5)
        elif "lora_" not in name:
            nn.init.normal_(p, std=0.1)
    return backbone.to(DEVICE).train()


def batch(shape: Any) -> tuple[Tensor, Tensor]:
    lengths = shape[5]
    longest = max(lengths)
    ids = torch.randint(1, 50, (len(lengths), longest), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
    return (ids * mask).to(DEVICE), mask.to(DEVICE)


def trained(backbone: Backbone) -> list[Tensor]:
    return [p for p in backbone.parameters() if p.requires_grad]


def outcome(backbone: Backbone, states: Tensor, mask: Tensor) -> list[Tensor]:
    """States of true tokens, and the gradients of A and B."""
    states = states * mask[..., None]
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    loss = (states * weights.to(states)).sum()
    return [states.detach(), *torch.autograd.grad(loss, trained(backbone))]


class Fixed(nn.Module):
    """Dropout by a given mask, in the place of what draws one."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask.to(x.dtype)


def packed(backbone: Backbone, weights: DecoderWeights, ids: Tensor, mask: Tensor, slots: int) -> tuple[Tensor, Any]:
    """States ``[B, L, D]`` by the kernels, and the node that made them."""
    from embedlab.backbones.slots import in_slots

    rows = in_slots(backbone, ids, mask, slots)
    states = fused_decoder.states(weights, rows.ids, rows.slots.bounds, rows.longest)
    node = states.grad_fn
    while node is not None and not type(node).__name__.startswith("_Blocks"):
        node = node.next_functions[0][0]
    return rows.slots.unpack(states), node


def masks_of(node: Any, dropout: float) -> list[list[Tensor]]:
    """Of each block, for its seven layers, ``[1, C, D]`` in fp64: 0, or 1 / (1 - p) of the probability drawn."""
    fields = fused_decoder._Kept._fields
    saved, found = node.saved_tensors[3:], []
    for start in range(0, len(saved), len(fields)):
        kept = fused_decoder._Kept(*saved[start : start + len(fields)])
        each: list[Tensor] = []
        for bits in (kept.bits1, kept.bits_o, kept.bits2, kept.bits_d):
            one = np.unpackbits(bits.cpu().numpy().view(np.uint8), axis=-1, bitorder="little")
            each += torch.from_numpy(one).to(DEVICE, torch.float64).unsqueeze(1).unbind(0)
        found.append([m / (1 - round(dropout * 2**16) / 2**16) for m in each])
    return found


def with_masks(backbone: Backbone, masks: list[list[Tensor]]) -> None:
    for block, some in zip(backbone.model.layers, masks, strict=True):
        for layer, mask in zip(fused_decoder._layers(block), some, strict=True):
            layer.lora_dropout["default"] = Fixed(mask)


class TestKernels:
    pytestmark = NEEDS

    @ids_of_shapes
    @pytest.mark.parametrize("dropout", [0.0, 0.05, 0.5])
    def test_values_and_gradients_are_those_of_pefts_layers(self, shape: Any, dropout: float) -> None:
        backbone, (ids, mask) = decoder(shape, dropout), batch(shape)
        assert fused_decoder.known(backbone)
        states, node = packed(backbone, DecoderWeights(backbone, torch.float32), ids, mask, shape[6])
        masks = masks_of(node, dropout) if dropout else None
        mine = outcome(backbone, states, mask)
        if masks is not None:
            with_masks(backbone, masks)
        backbone.double()
        want = outcome(backbone, backbone(ids, mask, capacity=shape[6])[0], mask)
        for a, b in zip(mine, want, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=2e-5 * b.abs().max().item())
