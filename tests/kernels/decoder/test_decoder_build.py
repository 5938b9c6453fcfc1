"""Which decoders with LoRA run by written-out blocks: generated ones as by PEFT's layers, others not at all."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from embedlab.backbones.architecture import describe
from embedlab.kernels.decoder import decoder_build
from embedlab.kernels.decoder.decoder_build import known, layers_of
from embedlab.kernels.decoder.fused_decoder import DecoderWeights
from tests.interpreted import INTERPRETED, NEEDS
from tests.kernels.decoder.test_fused_decoder import (
    SHAPES,
    batch,
    decoder,
    exactly,
    masks_of,
    outcome,
    packed,
    with_masks,
)

SHAPE = (4, 2, 32, 128, 16, (), 0)
THETA = {"rope_theta": 1e4}
ROTARY: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 5e5},
    {"rope_type": "linear", "factor": 4.0, **THETA},
    {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32, **THETA,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, **THETA},
    {"rope_type": "dynamic", "factor": 2.0, **THETA},
]  # fmt: skip
BUILDS: list[dict[str, Any]] = [
    {},
    {"attention_bias": True},
    {"mlp_bias": True},
    {"hidden_act": "gelu"},
    {"sliding_window": 4},
    {"rms_norm_eps": 0.1},
    {"num_hidden_layers": 1},
]


def drawn(seed: int) -> tuple[Any, dict[str, Any]]:
    """A shape and the settings of a decoder: most of them known here, some not."""
    draw = random.Random(seed)
    width = draw.choice((32, 64) if INTERPRETED else (32, 64, 128))
    shared = draw.choice((1, 2)) if width > 32 else 2
    heads = shared * draw.choice((1, 2, 3) if INTERPRETED else (1, 3, 4, 8))
    longest = 20 if INTERPRETED else {32: 128, 64: 128, 128: 64}[width]
    lengths = tuple(draw.randint(1, longest) for _ in range(draw.randint(1, 4 if INTERPRETED else 40)))
    inner, rank = draw.choice((64, 128, 192)), draw.choice((16, 32) if INTERPRETED else (16, 32, 64))
    more: dict[str, Any] = {
        "family": draw.choice(("Llama", "Mistral")),
        "hidden": draw.choice((192,) if heads % 3 == 0 else (64, 192) if INTERPRETED else (64, 192, 576)),
        "dropout": draw.choice((0.0, 1e-9, 0.05, 0.5)),
        "layers": 2,
        "rope_parameters": ROTARY[draw.choice((0, 0, 1, 2, 3, 4))],
        "tie_word_embeddings": draw.random() < 0.5,
    }
    for key, value in draw.choice([BUILDS[0], *BUILDS]).items():
        if key == "num_hidden_layers":
            more["layers"] = value
        elif more["family"] == "Llama" or key in ("sliding_window", "hidden_act", "rms_norm_eps"):
            more[key] = value
    if more["family"] == "Llama":
        more.pop("sliding_window", None)
    return (heads, shared, width, inner, rank, lengths, sum(lengths) + draw.randint(0, 30)), more


class TestGenerated:
    pytestmark = NEEDS

    @pytest.mark.parametrize("seed", range(16 if INTERPRETED else 48))
    def test_what_is_known_is_computed_as_by_pefts_layers(self, seed: int) -> None:
        shape, more = drawn(seed)
        backbone = decoder(shape, **more)
        if not known(backbone):
            pytest.skip("left to PEFT's layers")
        ids, mask = batch(shape)
        if seed % 2:
            ids, mask = ids.flip(1), mask.flip(1)  # padding on the left
        states, node = packed(backbone, DecoderWeights(backbone, torch.float32), ids, mask, shape[6])
        dropout = more["dropout"]
        masks = masks_of(node, dropout) if round(dropout * 2**16) else None
        mine = outcome(backbone, states, mask)
        for layer in (x for block in backbone.blocks for x in layers_of(block)):
            layer.lora_dropout["default"] = nn.Identity()
        if masks is not None:
            with_masks(backbone, masks)
        exactly(backbone)
        ids, mask = ids.cpu(), mask.cpu()
        plain = backbone(ids, mask, capacity=shape[6])[0] if masks is not None else backbone(ids, mask)[0]
        for a, b in zip(mine, outcome(backbone, plain, mask), strict=True):
            torch.testing.assert_close(a.double().cpu(), b, rtol=1e-3, atol=5e-5 * b.abs().max().item())

    def test_most_generated_ones_are_known_and_some_are_not(self) -> None:
        found = []
        for seed in range(40):
            shape, more = drawn(seed)
            found.append(known(decoder(shape, device="cpu", **more)))
        assert 10 < sum(found) < 35


@pytest.fixture
def triton_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_build, "has_triton", lambda: True)


def _attention(backbone: Any) -> Any:
    return backbone.blocks[1].self_attn


def _hook(backbone: Any) -> None:
    backbone.blocks[1].mlp.register_forward_hook(lambda *a: None)


def _hook_of_inputs(backbone: Any) -> None:
    backbone.model.embed_tokens.register_forward_hook(lambda m, i, out: out.requires_grad_(True))


def _another_forward(backbone: Any) -> None:
    mlp = backbone.blocks[1].mlp
    mlp.forward = lambda x: 2 * type(mlp).forward(mlp, x)


def _merge(backbone: Any) -> None:
    backbone.blocks[0].mlp.up_proj.merge()


def _train_a_norm(backbone: Any) -> None:
    backbone.model.norm.weight.requires_grad_(True)


def _train_base(backbone: Any) -> None:
    backbone.blocks[0].mlp.up_proj.base_layer.weight.requires_grad_(True)


def _another_share(backbone: Any) -> None:
    _attention(backbone).q_proj.lora_dropout["default"] = nn.Dropout(0.1)


def _another_kind_of_dropout(backbone: Any) -> None:
    _attention(backbone).q_proj.lora_dropout["default"] = nn.AlphaDropout(0.1)


def _another_scale(backbone: Any) -> None:
    _attention(backbone).q_proj.scaling["default"] = 3.0


def _another_scale_of_scores(backbone: Any) -> None:
    _attention(backbone).scaling *= 2


def _half(backbone: Any) -> None:
    backbone.half()


def _half_of_an_update(backbone: Any) -> None:
    _attention(backbone).q_proj.lora_A.half()


def _plain_layer(backbone: Any) -> None:
    backbone.blocks[0].mlp.up_proj = backbone.blocks[0].mlp.up_proj.base_layer


def _checkpoints(backbone: Any) -> None:
    backbone.model.gradient_checkpointing_enable()


def _looks_both_ways(backbone: Any) -> None:
    backbone.model.config.is_causal = False
    backbone.info = describe(backbone.model.config, False)


def _attends_both_ways(backbone: Any) -> None:
    _attention(backbone).is_causal = False


def _drops_scores(backbone: Any) -> None:
    _attention(backbone).attention_dropout = 0.1


def _another_activation(backbone: Any) -> None:
    backbone.blocks[1].mlp.act_fn = nn.GELU()


def _fewer_blocks(backbone: Any) -> None:
    backbone.model.config.num_hidden_layers = 1


def _other_positions(backbone: Any) -> None:
    backbone.model.rotary_emb.inv_freq = backbone.model.rotary_emb.inv_freq[:4]


def _constrained(backbone: Any) -> None:
    parametrize.register_parametrization(
        _attention(backbone).q_proj.lora_A["default"], "weight", nn.Identity()
    )


def _disabled(backbone: Any) -> None:
    _attention(backbone).q_proj.enable_adapters(False)


def _again(backbone: Any, name: str, **options: Any) -> None:
    """One more adapter, of PEFT's options, which is the only one in use."""
    from peft import LoraConfig, inject_adapter_in_model

    targets = list(decoder_build.LAYERS)
    config = LoraConfig(r=16, lora_alpha=8, target_modules=targets, **options)
    if name == "default":
        for block in backbone.blocks:
            for i, key in enumerate(decoder_build.LAYERS):
                owner = block.self_attn if i < 4 else block.mlp
                setattr(owner, key, getattr(owner, key).base_layer)
    inject_adapter_in_model(config, backbone.model, adapter_name=name)
    for layer in (x for block in backbone.blocks for x in layers_of(block)):
        layer.set_adapter([name] if name != "both" else ["default", "both"])
    for key, p in backbone.named_parameters():
        p.requires_grad_(".lora_" in key)


def _dora(backbone: Any) -> None:
    _again(backbone, "default", use_dora=True)


def _bias_of_updates(backbone: Any) -> None:
    _again(backbone, "default", lora_bias=True)


def _patterns_of_ranks(backbone: Any) -> None:
    _again(backbone, "default", rank_pattern={"layers.1.mlp.up_proj": 32})


def _patterns_of_scales(backbone: Any) -> None:
    _again(backbone, "default", alpha_pattern={"layers.1.mlp.up_proj": 32})


def _other_name(backbone: Any) -> None:
    _again(backbone, "other")


def _two_adapters(backbone: Any) -> None:
    _again(backbone, "both")


CHANGES = [
    _hook, _hook_of_inputs, _another_forward, _merge, _train_a_norm, _train_base, _another_share,
    _another_kind_of_dropout, _another_scale, _another_scale_of_scores, _half, _half_of_an_update, _plain_layer,
    _checkpoints, _looks_both_ways, _attends_both_ways, _drops_scores, _another_activation, _fewer_blocks,
    _other_positions, _constrained, _disabled, _dora, _bias_of_updates, _patterns_of_ranks, _patterns_of_scales,
    _other_name, _two_adapters,
]  # fmt: skip


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.usefixtures("triton_is_there")
def test_what_is_built_or_watched_otherwise_is_left_alone(change: Any, family: str) -> None:
    backbone = decoder(SHAPES[0], family=family, device="cpu")
    assert known(backbone)
    change(backbone)
    assert not known(backbone)


@pytest.mark.usefixtures("triton_is_there")
def test_an_adapter_made_anew_is_known() -> None:
    """So what was refused above was not for being made so."""
    backbone = decoder(SHAPES[0], device="cpu")
    _again(backbone, "default")
    assert known(backbone)
    _again(backbone, "default", use_rslora=True)  # a scale
    assert known(backbone)


@pytest.mark.parametrize(
    ("shape", "more"),
    [
        ((4, 2, 32, 96, 16, (), 0), {}),
        ((4, 2, 32, 128, 8, (), 0), {}),
        ((4, 4, 16, 128, 16, (), 0), {}),
        (SHAPE, {"attention_bias": True}),
        (SHAPE, {"mlp_bias": True}),
        (SHAPE, {"attention_dropout": 0.1}),
        (SHAPE, {"hidden_act": "gelu"}),
        (SHAPE, {"family": "Qwen3"}),
        (SHAPE, {"family": "Mistral", "sliding_window": 64}),
        *((SHAPE, {"rope_parameters": ROTARY[i]}) for i in (3, 4)),
    ],
)
@pytest.mark.usefixtures("triton_is_there")
def test_other_shapes_and_builds_are_left_alone(shape: Any, more: dict[str, Any]) -> None:
    assert not known(decoder(shape, device="cpu", **more))


@pytest.mark.parametrize("more", [{"sliding_window": None}, {"sliding_window": 4096}])
@pytest.mark.usefixtures("triton_is_there")
def test_mistral_is_known_and_an_option_goes_without(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = decoder(SHAPES[0], family="Mistral", device="cpu", **more)
    assert known(backbone)
    monkeypatch.setenv("EMBEDLAB_KERNELS", "fused_decoder=0")
    assert not known(backbone)
