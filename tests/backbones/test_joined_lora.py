"""LoRA layers that compute in groups: PEFT's values and gradients for each listed build, and what is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from embedlab.backbones import Backbone, joined_lora
from embedlab.backbones.adapters import adapt
from embedlab.backbones.architecture import describe
from embedlab.config.adapter import AdapterConfig
from embedlab.config.backbone import BackboneConfig
from embedlab.kernels.attention import register
from embedlab.kernels.packing import DECODER_TYPES
from tests.kernels.test_attention import NoHostReads
from tests.model_zoo import tiny_model

BASE = BackboneConfig(source="local", path=".")
LENGTHS = (12, 5, 1, 7, 12, 3)
JOINED = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text", "smollm3", "olmo2", "granite")
"""Those whose layers compute in groups of three and two; the others' one by one."""


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.manual_seed(0)  # a state at the kink of OPT's ReLU has either gradient
    yield
    torch._dynamo.reset()


def adapted(model_type: str, dropout: float = 0.0, r: int = 16, **more: Any) -> Backbone:
    """A tiny decoder whose updates are no longer zero; their scale is a half."""
    model: Any = tiny_model(model_type)
    backbone = Backbone(model, describe(model.config, False), None, "sdpa")
    backbone.model.set_attn_implementation(register())
    adapt(backbone, AdapterConfig(name="lora", r=r, alpha=r / 2, dropout=dropout, **more), BASE)
    for name, p in backbone.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.3)
    return backbone.train()


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(10, 100, (len(LENGTHS), 12), generator=torch.Generator().manual_seed(0))
    return ids, (torch.arange(12) < torch.tensor(LENGTHS)[:, None]).long()


def outcome(backbone: Backbone, capacity: int | None) -> list[Tensor]:
    """Hidden states of true tokens, and the gradients of what is trained."""
    ids, mask = batch()
    states = backbone(ids, mask, capacity=capacity)[0] * mask[..., None]
    trained = [p for p in backbone.parameters() if p.requires_grad]
    return [states, *torch.autograd.grad(states.float().sin().sum(), trained)]


@pytest.mark.parametrize("capacity", [None, 40, 72])
@pytest.mark.parametrize("model_type", sorted(DECODER_TYPES))
def test_values_and_gradients_are_those_of_pefts_layers(model_type: str, capacity: int | None) -> None:
    backbone = adapted(model_type).eval()  # OPT has dropout of its own
    want = outcome(backbone, None)
    sizes = [len(group) for group in joined_lora._groups(backbone.model)]
    assert sorted(sizes) == sorted([3, 2, 1, 1] * 2 if model_type in JOINED else [1] * len(sizes))
    with joined_lora.joined(backbone.model):
        got = outcome(backbone, capacity)
    for mine, its in zip(got, want, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5 * max(1.0, its.abs().max().item()))


def test_under_autocast_it_is_no_further_from_fp32_than_pefts() -> None:
    backbone = adapted("llama")
    want = outcome(backbone, None)

    def off() -> float:
        with torch.autocast("cpu", torch.bfloat16):
            return sum(
                ((a - b).norm() / b.norm()).item() for a, b in zip(outcome(backbone, 72), want, strict=True)
            )

    plain = off()
    with joined_lora.joined(backbone.model):
        assert off() < 1.2 * plain


def test_updates_have_dropout_in_training_alone() -> None:
    backbone = adapted("llama", dropout=0.3)
    with joined_lora.joined(backbone.model):
        one, other = (outcome(backbone, 72)[0] for _ in range(2))
        assert (one - other).abs().max() > 1e-2
        backbone.eval()
        one, other = (outcome(backbone, 72)[0] for _ in range(2))
        assert torch.equal(one, other)


@pytest.mark.parametrize("autocast", [False, True])
def test_the_host_waits_for_nothing_and_few_compilations_serve_all_blocks(autocast: bool) -> None:
    """The first block's input has no gradient, the others' has: two, whatever the number of tokens."""
    backbone, close = adapted("llama"), 0.2 if autocast else 1e-4
    want = outcome(backbone, 48)[0]
    counter, compiled = CompileCounterWithBackend("aot_eager"), []
    backbone.compile_blocks(backend=counter, dynamic=True, fullgraph=True)
    with joined_lora.joined(backbone.model), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for capacity in (50, 70, 200):  # no width of the model: the compiler takes equal sizes for one
            got = outcome(backbone, capacity)[0]
            torch.testing.assert_close(got.float(), want, rtol=close, atol=close)
            compiled.append(counter.frame_count)
    assert len(set(compiled)) == 1
    assert compiled[0] <= 3  # one of them is traced twice


def test_no_value_is_read_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    from embedlab.kernels import varlen_attention

    def as_on_a_card(*args: Any) -> Tensor:
        *tensors, scale, dropout, causal, _ = args
        return varlen_attention.varlen_attention(*tensors, torch.zeros(1).long(), 32, scale, dropout, causal)

    monkeypatch.setattr(varlen_attention, "padded_attention", as_on_a_card)
    backbone = adapted("llama")
    with joined_lora.joined(backbone.model), NoHostReads():
        outcome(backbone, 72)


def test_layers_are_pefts_again_afterwards() -> None:
    backbone = adapted("llama")
    before = {n: type(m) for n, m in backbone.named_modules()}
    keys = list(backbone.state_dict())

    def failing() -> None:
        with joined_lora.joined(backbone.model):
            assert list(backbone.state_dict()) == keys
            assert {n: type(m) for n, m in backbone.named_modules()} != before
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert {n: type(m) for n, m in backbone.named_modules()} == before


def _hook(layer: Any) -> None:
    layer.register_forward_hook(lambda *a: None)


def _merge(layer: Any) -> None:
    layer.merge()


def _disable(layer: Any) -> None:
    layer.enable_adapters(False)


def _train_base(layer: Any) -> None:
    layer.base_layer.weight.requires_grad_(True)


def _quantize(layer: Any) -> None:
    layer.base_layer.__class__ = type("Linear4bit", (nn.Linear,), {})


@pytest.mark.parametrize("change", [_hook, _merge, _disable, _train_base, _quantize])
def test_a_layer_that_is_more_than_that_is_left_alone(change: Callable[[Any], None]) -> None:
    backbone = adapted("llama")
    first: Any = backbone.blocks[0]
    change(first.self_attn.k_proj)
    groups = joined_lora._groups(backbone.model)
    assert sorted(map(len, groups)) == [1] * 6 + [2, 2, 3]
    assert first.self_attn.k_proj not in [layer for group in groups for layer in group]


def test_an_option_goes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBEDLAB_KERNELS", "joined_lora=0")
    backbone = adapted("llama")
    before = {n: type(m) for n, m in backbone.named_modules()}
    with joined_lora.joined(backbone.model):
        assert {n: type(m) for n, m in backbone.named_modules()} == before
