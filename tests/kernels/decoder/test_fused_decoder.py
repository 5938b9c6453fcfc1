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
from embedlab.kernels.decoder import fused_decoder
from embedlab.kernels.decoder.decoder_build import known, layers_of
from embedlab.kernels.decoder.fused_decoder import DecoderWeights
from tests.interpreted import DEVICE, NEEDS

BASE = BackboneConfig(source="local", path=".")
SHAPES = [
    # heads, shared, width of a head, inner, rank, lengths, slots
    (4, 2, 32, 128, 16, (12, 5, 1, 7), 40),
    (2, 2, 32, 64, 16, (3, 20), 23),
    (1, 1, 64, 192, 32, (1, 6), 70),
]
ids_of_shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[2]}-{s[4]}-{s[6]}")


def decoder(
    shape: Any,
    dropout: float = 0.0,
    family: str = "Llama",
    hidden: int = 64,
    layers: int = 2,
    device: str = DEVICE,
    **more: Any,
) -> Backbone:
    """Some blocks whose updates are no longer zero."""
    import transformers

    heads, shared, width, inner, rank, *_ = shape
    config = getattr(transformers, f"{family}Config")(
        vocab_size=50, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
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
    return backbone.to(device).train()


def batch(shape: Any) -> tuple[Tensor, Tensor]:
    lengths = shape[5]
    longest = max(lengths)
    ids = torch.randint(1, 50, (len(lengths), longest), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
    return (ids * mask).to(DEVICE), mask.to(DEVICE)


def trained(backbone: Backbone) -> list[Tensor]:
    return [p for p in backbone.parameters() if p.requires_grad]


def exactly(backbone: Backbone) -> Backbone:
    """It, for fp64, which the kernels of a card are not for."""
    return backbone.double().cpu()


def outcome(backbone: Backbone, states: Tensor, mask: Tensor, **options: Any) -> list[Tensor]:
    """States of true tokens, and the gradients of A and B."""
    states = states * mask[..., None]
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    loss = (states * weights.to(states)).sum()
    return [states.detach(), *torch.autograd.grad(loss, trained(backbone), **options)]


class Fixed(nn.Module):
    """Dropout by a given mask, in the place of what draws one."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask.to(x.dtype)


def packed(
    backbone: Backbone,
    weights: DecoderWeights,
    ids: Tensor,
    mask: Tensor,
    slots: int,
    slot: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """States ``[B, L, D]``, or ``[N, D]`` in some slots, by the kernels, and the node that made them."""
    from embedlab.backbones.slots import in_slots

    rows = in_slots(backbone, ids, mask, slots)
    (states,) = fused_decoder.states(weights, rows.ids, rows.slots.bounds, rows.longest, slot)
    node = states.grad_fn
    while node is not None and not type(node).__name__.startswith("_Blocks"):
        node = node.next_functions[0][0]
    return states if slot is not None else rows.slots.unpack(states), node


def masks_of(node: Any, dropout: float) -> list[list[Tensor]]:
    """Of each block, for its seven layers, ``[1, C, D]`` in fp64: 0, or 1 / (1 - p) of the probability drawn."""
    fields = fused_decoder._Kept._fields
    saved, found = node.saved_tensors[4:], []
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
        for layer, mask in zip(layers_of(block), some, strict=True):
            layer.lora_dropout["default"] = Fixed(mask.cpu())


class TestKernels:
    pytestmark = NEEDS

    @ids_of_shapes
    @pytest.mark.parametrize("dropout", [0.0, 0.05, 0.5])
    def test_values_and_gradients_are_those_of_pefts_layers(self, shape: Any, dropout: float) -> None:
        backbone, (ids, mask) = decoder(shape, dropout), batch(shape)
        assert known(backbone)
        states, node = packed(backbone, DecoderWeights(backbone, torch.float32), ids, mask, shape[6])
        masks = masks_of(node, dropout) if dropout else None
        mine = outcome(backbone, states, mask)
        if masks is not None:
            with_masks(backbone, masks)
        exactly(backbone)
        ids, mask = ids.cpu(), mask.cpu()
        want = outcome(backbone, backbone(ids, mask, capacity=shape[6])[0], mask)
        for a, b in zip(mine, want, strict=True):
            torch.testing.assert_close(a.double().cpu(), b, rtol=1e-4, atol=2e-5 * b.abs().max().item())

    @pytest.mark.parametrize(("dropout", "numbers"), [(0.0, [2, 22, 10, 2]), (0.3, [2, 22, 10])])
    def test_in_some_slots_it_is_the_same(self, dropout: float, numbers: list[int]) -> None:
        """One of them twice: rows without a token share one."""
        shape = SHAPES[1]
        backbone, (ids, mask) = decoder(shape, dropout), batch(shape)
        slot, ones = torch.tensor(numbers, device=DEVICE), torch.ones(len(numbers), device=DEVICE)
        states, node = packed(backbone, DecoderWeights(backbone, torch.float32), ids, mask, 23, slot)
        masks = masks_of(node, dropout) if dropout else None
        mine = outcome(backbone, states, ones)
        if masks is not None:
            for i in range(3, 7):  # of the layers behind attention
                some = masks[-1][i]
                masks[-1][i] = some.new_ones(1, 23, some.shape[-1]).index_copy(1, slot, some)
            with_masks(backbone, masks)
        exactly(backbone)
        ids, mask = ids.cpu(), mask.cpu()
        flat = backbone(ids, mask, capacity=23)[0][mask.bool()][slot.cpu()]
        for a, b in zip(mine, outcome(backbone, flat, ones.cpu()), strict=True):
            torch.testing.assert_close(a.double().cpu(), b, rtol=1e-4, atol=2e-5 * b.abs().max().item())

    def test_each_layer_of_each_block_has_masks_of_its_own(self) -> None:
        shape = SHAPES[0]
        backbone, (ids, mask) = decoder(shape, 0.5), batch(shape)
        weights = DecoderWeights(backbone, torch.float32)
        found = [masks_of(packed(backbone, weights, ids, mask, shape[6])[1], 0.5) for _ in range(2)]
        kept = [m > 0 for masks in found for some in masks for m in some if m.shape[-1] == 64]
        assert len(kept) == 2 * 2 * 5  # of two passes: all but those of the other layers' inputs
        for i, one in enumerate(kept):
            assert one.float().mean().item() == pytest.approx(0.5, abs=0.05)
            for other in kept[:i]:
                assert (one == other).float().mean().item() == pytest.approx(0.5, abs=0.05)

    def test_a_pass_without_gradients_drops_nothing_in_evaluation_and_has_the_present_matrices(self) -> None:
        shape = SHAPES[1]
        backbone, (ids, mask) = decoder(shape, 0.5).eval(), batch(shape)
        weights = DecoderWeights(backbone, torch.float32)
        for _ in range(2):
            with torch.no_grad():
                got = packed(backbone, weights, ids, mask, shape[6])[0] * mask[..., None]
                want = backbone(ids, mask)[0] * mask[..., None]
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
                for p in trained(backbone):
                    p += 0.1

    def test_embeddings_that_are_trained_have_their_gradient(self) -> None:
        shape = SHAPES[1]
        backbone, (ids, mask) = decoder(shape), batch(shape)
        backbone.model.embed_tokens.requires_grad_(True)
        mine = outcome(
            backbone, packed(backbone, DecoderWeights(backbone, torch.float32), ids, mask, 23)[0], mask
        )
        for a, b in zip(mine, outcome(backbone, backbone(ids, mask)[0], mask), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * b.abs().max().item())

    def test_the_forward_of_a_computing_backbone_runs_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[int] = []
        run = fused_decoder.states

        def counted(*args: Any, **options: Any) -> tuple[Tensor, ...]:
            calls.append(1)
            return run(*args, **options)

        monkeypatch.setattr(fused_decoder, "states", counted)
        monkeypatch.setattr(fused_decoder, "applies", lambda weights, device: weights is not None)
        shape = SHAPES[1]
        backbone, (ids, mask) = decoder(shape), batch(shape)
        with torch.no_grad(), backbone.computing(False, DecoderWeights(backbone, torch.float32)):
            (got,) = backbone(ids, mask, capacity=23)
            assert calls == [1]
            at = torch.tensor([[0, 2], [7, 19]], device=DEVICE)
            assert backbone.reads_one(ids.device, packed=True)
            for position in (at, at[:, 0]):
                (some,) = backbone(ids, mask, capacity=23, position=position)
                wanted = got.gather(1, position.view(2, -1, 1).expand(-1, -1, got.shape[-1]))
                torch.testing.assert_close(some, wanted, rtol=1e-4, atol=1e-5)
            calls[1:] = []
            if DEVICE == "cpu":  # on a card their attention has its own kernels
                places = (torch.arange(20) * mask).to(ids)
                others = backbone(ids, mask), backbone(ids, mask, capacity=23, position_ids=places)
                assert calls == [1]
                for (want,) in others:
                    torch.testing.assert_close(got, want * mask[..., None], rtol=1e-4, atol=1e-4)

    def test_states_after_every_block_and_their_gradients(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fused_decoder, "applies", lambda weights, device: weights is not None)
        shape = SHAPES[1]
        backbone, (ids, mask) = decoder(shape, layers=3), batch(shape)
        for chosen in ([0, 1, 2, 3], [2], [1, 3]):
            found = []
            for weights in (DecoderWeights(backbone, torch.float32), None):
                with backbone.computing(False, weights):
                    states = backbone(ids, mask, capacity=23 if weights else None, all_layers=True)
                assert len(states) == 4
                found.append(
                    outcome(backbone, torch.stack([states[i] for i in chosen]), mask, allow_unused=True)
                )
            for a, b in zip(*found, strict=True):
                assert (a is None) == (b is None) or not (a if b is None else b).any()
                if a is not None and b is not None:
                    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * b.abs().max().item())

    @pytest.mark.gpu
    @pytest.mark.parametrize("scale", [1.0, 1e-3])
    def test_in_bf16_it_is_no_further_from_fp64_than_layers_joined(self, scale: float) -> None:
        """Of SmolLM2's shape with six blocks; `scale`: of B, which begins at 0."""
        from embedlab.backbones.joined_lora import joined

        lengths = tuple(torch.randint(5, 49, (64,), generator=torch.Generator().manual_seed(3)).tolist())
        shape = (9, 3, 64, 1536, 16, lengths, 64 * -(-sum(lengths) // 64))
        backbone = decoder(shape, hidden=576, layers=6)
        for name, p in backbone.named_parameters():
            if "lora_B" in name:
                p.data *= scale
            elif "lora_" not in name and p.dim() == 2:
                p.data *= 0.3
        ids, mask = batch(shape)
        with torch.autocast("cuda", torch.bfloat16):
            mine = outcome(backbone, packed(backbone, DecoderWeights(backbone), ids, mask, shape[6])[0], mask)
            with joined(backbone.model):
                before = outcome(backbone, backbone(ids, mask, capacity=shape[6])[0], mask)
        exact = outcome(backbone.double(), backbone(ids, mask)[0], mask)
        names = ["states", *(n for n, p in backbone.named_parameters() if p.requires_grad)]
        kinds = (
            "states",
            "q_proj.lora_A",
            "down_proj.lora_A",
            "lora_A",
            "q_proj.lora_B",
            "up_proj.lora_B",
            "lora_B",
        )
        for kind in kinds:
            chosen = [i for i, n in enumerate(names) if kind in n]
            errors = [
                sum((found[i].double() - exact[i]).square().sum() for i in chosen).sqrt().item()  # type: ignore[union-attr]
                / sum(exact[i].square().sum() for i in chosen).sqrt().item()  # type: ignore[union-attr]
                for found in (mine, before)
            ]
            print(f"{kind} at {scale}: fused {errors[0]:.3e}, joined {errors[1]:.3e}")
            assert errors[0] < 1.1 * errors[1], kind


def test_only_captured_steps_on_a_card_in_bf16_run_so(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, card = DecoderWeights(decoder(SHAPES[0], device="cpu")), torch.device("cuda")
    assert not fused_decoder.applies(weights, card)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: True)
    for dtype in (torch.bfloat16, torch.float16):
        monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind, dtype=dtype: dtype)
        assert fused_decoder.applies(weights, card) == (dtype == torch.bfloat16)
        assert not fused_decoder.applies(weights, torch.device("cpu"))
        assert not fused_decoder.applies(None, card)
