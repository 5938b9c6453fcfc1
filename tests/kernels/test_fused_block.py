"""Embeddings and blocks with gradients written out: the states and gradients of transformers' modules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from embedlab.backbones import Backbone, load_backbone
from embedlab.config.backbone import BackboneConfig
from embedlab.engine.precision import ComputeCopy
from embedlab.kernels import fused_block
from embedlab.pooling import build_pooling
from tests.backbones.test_last_block import MODELS, batch
from tests.kernels.test_attention import load

Tiny = Callable[..., Path]


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off a card too, wherever the build is known."""
    monkeypatch.setattr(fused_block, "applies", lambda backbone, device: fused_block.fusable(backbone))


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def step(backbone: Backbone, read: Callable[[Backbone], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """What `read` gives with the weights of a copy in fp32, and the gradients of all weights."""
    twins = ComputeCopy(backbone, torch.float32)
    torch.manual_seed(5)
    with twins.swapped():
        out = read(backbone)
        out.sin().sum().backward()
    twins.hand_over(add=False)
    found = {n: p.grad.clone() for n, p in backbone.named_parameters() if p.grad is not None}
    for p in backbone.parameters():
        p.grad = None
    return out.detach(), found


def whole(backbone: Backbone) -> Tensor:
    ids, mask = batch()
    return backbone(ids, mask, capacity=int(mask.sum()) + 7)[0]


def all_layers(backbone: Backbone) -> Tensor:
    ids, mask = batch("left")
    return torch.stack(backbone(ids, mask, capacity=int(mask.sum()) + 7, all_layers=True))


def one(backbone: Backbone) -> Tensor:
    ids, mask = batch()
    mask[2] = 0  # a row without tokens
    pool = build_pooling("cls", backbone.info)
    return pool(backbone(ids, mask, capacity=40, position=pool.position(mask, {})), mask, {})


def with_padding_as_tokens(backbone: Backbone) -> Tensor:
    """Padding's id and place among the tokens: their embeddings get no gradient."""
    ids, mask = batch()
    pad = backbone.model.config.pad_token_id
    ids[0, 2], ids[1, 1] = pad, pad
    positions = torch.arange(ids.shape[1]).expand_as(ids) + (2 if backbone.info.model_type != "bert" else 0)
    if backbone.info.model_type in ("roberta", "xlm-roberta"):
        positions = positions.clone()
        positions[0, 3] = pad
    return backbone(ids, mask, positions, capacity=int(mask.sum()) + 7)[0]


@pytest.mark.parametrize("read", [whole, all_layers, one, with_padding_as_tokens])
@pytest.mark.parametrize("model_type", [*MODELS, "xlm-roberta"])
def test_states_and_gradients_are_those_of_the_modules(
    tiny: Tiny, model_type: str, read: Callable[[Backbone], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = load(tiny, model_type).eval()
    want, its = step(backbone, read)
    monkeypatch.setattr(fused_block, "applies", lambda backbone, device: fused_block.fusable(backbone))
    called = []
    real = fused_block.states
    monkeypatch.setattr(fused_block, "states", lambda *a, **k: called.append(1) or real(*a, **k))
    got, mine = step(backbone, read)
    assert called == [1]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert mine.keys() == its.keys()
    for name in its:
        torch.testing.assert_close(
            mine[name], its[name], rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_gradients_with_dropout_are_those_of_finite_differences(tiny: Tiny, everywhere: None) -> None:
    backbone = load(tiny, "bert").train().double()
    assert backbone.info.dropout > 0
    twins = ComputeCopy(copy.deepcopy(backbone).float(), torch.float32)
    backbone = twins.module  # type: ignore[assignment]
    parameters = dict(backbone.named_parameters())
    with torch.no_grad():
        for p in parameters.values():
            p.add_(torch.randn_like(p) * 0.05)
    _, gradients = step(backbone, whole)
    generator = torch.Generator().manual_seed(1)
    direction = {
        n: torch.randn(p.shape, generator=generator) * p.detach().std().clamp(min=1e-2)
        for n, p in parameters.items()
    }
    inner = sum(float((gradients[n] * direction[n]).sum()) for n in gradients)
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            for n, p in parameters.items():
                p.add_(direction[n], alpha=sign * 1e-3)
        values.append(float(step(backbone, whole)[0].double().sin().sum()))
        with torch.no_grad():
            for n, p in parameters.items():
                p.sub_(direction[n], alpha=sign * 1e-3)
    assert inner == pytest.approx((values[0] - values[1]) / 2e-3, rel=2e-2)


def test_a_tied_head_adds_its_gradient(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone, _ = load_backbone(BackboneConfig(source="local", path=str(tiny("bert"))), head="masked_lm")
    backbone.eval()
    assert backbone.head is not None

    def logits(of: Backbone) -> Tensor:
        return of.head(whole(of))  # type: ignore[misc]

    want, its = step(backbone, logits)
    monkeypatch.setattr(fused_block, "applies", lambda backbone, device: fused_block.fusable(backbone))
    got, mine = step(backbone, logits)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    name = "model.embeddings.word_embeddings.weight"
    assert float(its[name].abs().max()) > 0
    torch.testing.assert_close(mine[name], its[name], rtol=1e-4, atol=2e-5)


Run = tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]


def three_updates(backbone: Backbone, twins: ComputeCopy, forwards: int) -> Run:
    """Losses, the last gradients and the weights afterwards."""
    optimizer = torch.optim.AdamW(backbone.parameters(), lr=1e-3, eps=1e-3)
    losses = []
    for _ in range(3):
        twins.refresh()
        with twins.swapped():
            loss = sum((whole(backbone).sin().mean() for _ in range(forwards)), torch.zeros(()))
            loss.backward()
        twins.hand_over(add=False)
        losses.append(loss.detach())
        gradients = {n: p.grad.clone() for n, p in backbone.named_parameters() if p.grad is not None}
        optimizer.step()
    return losses, gradients, {n: p.detach() for n, p in backbone.named_parameters()}


@pytest.mark.parametrize("forwards", [1, 2])
@pytest.mark.parametrize("model_type", [*MODELS, "xlm-roberta"])
def test_joined_weights_learn_as_those_of_three_layers(
    tiny: Tiny, model_type: str, forwards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read as one by the blocks here, and as slices of it by the modules."""
    start = load(tiny, model_type).eval()

    def run(switch: str, fuses: bool) -> Run:
        monkeypatch.setenv("EMBEDLAB_KERNELS", f"fused_block={switch}")
        monkeypatch.setattr(fused_block, "applies", lambda b, device: fuses and fused_block.fusable(b))
        backbone = copy.deepcopy(start)
        twins = ComputeCopy(backbone, torch.float32)
        assert len(twins._joints) == int(switch) * backbone.info.layers
        return three_updates(backbone, twins, forwards)

    apart = run("0", False)
    for (losses, gradients, weights), close in ((run("1", False), 1e-6), (run("1", True), 1e-4)):
        torch.testing.assert_close(losses, apart[0], rtol=close, atol=1e-6)
        for mine, its in ((gradients, apart[1]), (weights, apart[2])):
            assert mine.keys() == its.keys()
            for name in its:
                torch.testing.assert_close(mine[name], its[name], rtol=10 * close, atol=1e-6)


def test_twins_and_their_gradients_are_slices_of_one(tiny: Tiny, everywhere: None) -> None:
    backbone = load(tiny, "bert").train()
    twins = ComputeCopy(backbone, torch.float32)
    names = [n for n, _ in backbone.named_parameters()]
    with twins.swapped():
        whole(backbone).sin().mean().backward()
    twins.collect()
    joint = twins._joints[0]
    for kind in ("joined_weight", "joined_bias"):
        size = joint.whole[kind].numel() // 3
        for at, twin in enumerate(joint.parts[kind]):
            assert twin.data_ptr() == joint.whole[kind].data_ptr() + 4 * at * size
            assert twin.grad is not None
            assert twin.grad.is_contiguous()
            assert twin.grad.data_ptr() == joint.parts[kind][0].grad.data_ptr() + 4 * at * size  # type: ignore[union-attr]
            assert joint.whole[kind].grad is None
    # What the update writes to a twin, the next forward reads.
    joint.parts["joined_bias"][1].detach().fill_(7.0)
    assert joint.whole["joined_bias"].view(3, -1)[1].eq(7.0).all()
    assert [n for n, _ in backbone.named_parameters()] == names


@pytest.mark.parametrize("model_type", ["bert", "distilbert"])
def test_where_a_weight_is_frozen_one_compilation_serves_all_capacities(tiny: Tiny, model_type: str) -> None:
    """The modules run then, on slices of the joined weights."""
    backbone = load(tiny, model_type).eval()
    backbone.model.embeddings.LayerNorm.bias.requires_grad_(False)
    ids, mask = batch()
    want = backbone(ids, mask, capacity=64)[0]
    twins = ComputeCopy(backbone, torch.float32)
    assert len(twins._joints) == backbone.info.layers
    counter = CompileCounterWithBackend("aot_eager")
    backbone.compile_blocks(backend=counter, dynamic=True, fullgraph=True)
    with twins.swapped():
        assert not fused_block.fusable(backbone)
        for capacity in (48, 64, 96):
            got = backbone(ids, mask, capacity=capacity)[0]
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
            got.sin().mean().backward()
    assert counter.frame_count <= 2
    # After the step the module computes as ever.
    torch.testing.assert_close(backbone(ids, mask, capacity=64)[0], want, rtol=1e-5, atol=1e-5)


def test_layers_that_are_more_than_a_product_are_not_joined(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone: Any = load(tiny, "bert")
    attention, frozen = (block.attention.self for block in backbone.blocks)
    assert fused_block.joinable(attention, torch.bfloat16)
    with monkeypatch.context() as patch:
        patch.setenv("EMBEDLAB_KERNELS", "fused_block=0")
        assert fused_block.joinable(attention, torch.bfloat16) is None
    attention.key.register_forward_hook(lambda *a: None)
    frozen.value.requires_grad_(False)
    for module in (attention, frozen, nn.Linear(4, 4)):
        assert fused_block.joinable(module, torch.bfloat16) is None


def fits(backbone: Backbone) -> bool:
    with ComputeCopy(backbone, torch.float32).swapped():
        return fused_block.fusable(backbone)


def _freeze(backbone: Any) -> None:
    backbone.blocks[1].output.dense.bias.requires_grad_(False)


def _freeze_embeddings(backbone: Any) -> None:
    backbone.model.embeddings.position_embeddings.weight.requires_grad_(False)


def _hook(backbone: Any) -> None:
    backbone.blocks[0].intermediate.register_forward_hook(lambda m, args, out: None)


def _patch(backbone: Any) -> None:
    backbone.blocks[0].forward = backbone.blocks[0].forward


def _checkpoint(backbone: Any) -> None:
    backbone.train()
    backbone.blocks[0].gradient_checkpointing = True


def _activation(backbone: Any) -> None:
    backbone.model.config.hidden_act = "relu"


def _another_layer(backbone: Any) -> None:
    dense = backbone.blocks[0].output.dense
    backbone.blocks[0].output.dense = torch.nn.Sequential(dense)


def _subclass(backbone: Any) -> None:
    output = backbone.blocks[0].output
    output.__class__ = type("BertOutputToo", (type(output),), {})


def _backward_hook(backbone: Any) -> None:
    backbone.blocks[0].register_full_backward_pre_hook(lambda m, grads: None)


def _hook_on_the_encoder(backbone: Any) -> None:
    backbone.model.encoder.register_forward_hook(lambda m, args, out: None)


def _another_activation(backbone: Any) -> None:
    backbone.blocks[0].intermediate.intermediate_act_fn = torch.nn.ReLU()


def _no_dropout(backbone: Any) -> None:
    backbone.blocks[0].output.dropout = torch.nn.Identity()


def _two_modes(backbone: Any) -> None:
    backbone.blocks[0].attention.output.dropout.train()


def _embeddings_dropout(backbone: Any) -> None:
    backbone.model.embeddings.dropout = torch.nn.AlphaDropout(0.1)


def _three_products(backbone: Any) -> None:
    backbone.blocks[1].attention.self.query.register_forward_hook(lambda m, args, out: None)


@pytest.mark.parametrize(
    "change",
    [
        _freeze,
        _freeze_embeddings,
        _hook,
        _patch,
        _checkpoint,
        _activation,
        _another_layer,
        _three_products,
        _subclass,
        _backward_hook,
        _hook_on_the_encoder,
        _another_activation,
        _no_dropout,
        _two_modes,
        _embeddings_dropout,
    ],
)
def test_what_is_built_or_watched_otherwise_is_left_alone(tiny: Tiny, change: Callable[[Any], None]) -> None:
    backbone = load(tiny, "bert").eval()
    assert fits(backbone)
    change(backbone)
    assert not fits(backbone)


def test_only_captured_steps_on_a_card_run_so(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_block, "has_triton", lambda: True)
    backbone, card = load(tiny, "bert").eval(), torch.device("cuda")
    with ComputeCopy(backbone, torch.float32).swapped():
        assert not fused_block.applies(backbone, card)
        with backbone.computing(low_precision_weights=True):
            assert fused_block.applies(backbone, card)
            assert not fused_block.applies(backbone, torch.device("cpu"))
            monkeypatch.setenv("EMBEDLAB_KERNELS", "fused_block=0")
            assert not fused_block.applies(backbone, card)


def test_of_other_models_nothing_is_fused(tiny: Tiny) -> None:
    assert not fits(load(tiny, "modernbert"))
