"""Query, key and value by one product: the same losses, gradients and updates as by three."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from embedlab.backbones import Backbone
from embedlab.engine.precision import ComputeCopy
from embedlab.kernels import varlen_attention
from embedlab.kernels.fused_qkv import joinable
from tests.kernels.test_attention import load
from tests.kernels.test_packing import MODELS, batch

Tiny = Callable[..., Path]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def joints(twins: ComputeCopy) -> int:
    return len(twins._joints)


def by_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    scale: float,
    dropout: float,
    causal: bool,
    window: int | None,
) -> Tensor:
    seed = torch.randint(2**31 - 1, (1,))
    return varlen_attention.varlen_attention(q, k, v, bounds, seed, 128, scale, dropout, causal)


def pair(tiny: Tiny, model_type: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Backbone, ComputeCopy]]:
    """The same backbone with three products and with one, with their copies in fp32."""
    # As on CUDA: off it three products would go to torch's own attention, with other dropout.
    monkeypatch.setattr(varlen_attention, "padded_attention", by_operator)
    backbone = load(tiny, model_type).train()
    out = []
    for switch in ("0", "1"):
        monkeypatch.setenv("EMBEDLAB_KERNELS", f"fused_qkv={switch}")
        one = copy.deepcopy(backbone)
        out.append((one, ComputeCopy(one, torch.float32)))
    assert [joints(c) for _, c in out] == [0, backbone.info.layers]
    return out


def step(backbone: Backbone, twins: ComputeCopy, capacity: int | None = 64, forwards: int = 1) -> Tensor:
    """Loss with dropout; the gradients are the masters' afterwards."""
    ids, mask = batch()
    torch.manual_seed(3)
    twins.refresh()
    with twins.swapped():
        states = [backbone(ids, mask, capacity=capacity)[0] for _ in range(forwards)]
        loss = sum(((h * mask[..., None]).sin().mean() for h in states), torch.zeros(()))
        loss.backward()
    twins.hand_over(add=False)
    return loss.detach()


@pytest.mark.parametrize("forwards", [1, 2])
@pytest.mark.parametrize("model_type", MODELS)
def test_losses_gradients_and_updates_are_those_of_three_products(
    tiny: Tiny, model_type: str, forwards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    for backbone, twins in pair(tiny, model_type, monkeypatch):
        optimizer = torch.optim.AdamW(backbone.parameters(), lr=1e-3, eps=1e-3)
        losses = []
        for _ in range(3):
            losses.append(step(backbone, twins, forwards=forwards))
            grads = {n: p.grad.clone() for n, p in backbone.named_parameters() if p.grad is not None}
            optimizer.step()
        runs.append((losses, grads, dict(backbone.named_parameters())))
    (losses, grads, weights), (other_losses, other_grads, other_weights) = runs
    torch.testing.assert_close(other_losses, losses, rtol=1e-6, atol=1e-6)
    assert grads.keys() == other_grads.keys()
    for name in grads:
        torch.testing.assert_close(other_grads[name], grads[name], rtol=1e-5, atol=1e-6)
    for name in weights:
        torch.testing.assert_close(other_weights[name], weights[name], rtol=1e-5, atol=1e-6)


def test_padded_rows_take_the_three_products(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    (one, plain), (other, joined) = pair(tiny, "bert", monkeypatch)
    assert torch.equal(step(one, plain, capacity=None), step(other, joined, capacity=None))
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or torch.equal(p.grad, q.grad)


def test_twins_and_their_gradients_are_slices_of_one(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    _, (backbone, twins) = pair(tiny, "bert", monkeypatch)
    names = [n for n, _ in backbone.named_parameters()]
    ids, mask = batch()
    with twins.swapped():
        backbone(ids, mask, capacity=64)[0].sin().mean().backward()
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
    assert type(joint.module) is joint.plain
    assert [n for n, _ in backbone.named_parameters()] == names


@pytest.mark.parametrize("model_type", ["bert", "distilbert"])
def test_one_compilation_serves_all_capacities(
    tiny: Tiny, model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    (plain, _), (backbone, twins) = pair(tiny, model_type, monkeypatch)
    plain.eval()
    backbone.eval()
    ids, mask = batch()
    counter = CompileCounterWithBackend("aot_eager")
    want = plain(ids, mask, capacity=64)[0]
    backbone.compile_blocks(backend=counter, dynamic=True, fullgraph=True)
    with twins.swapped():
        for capacity in (48, 64, 96):
            got = backbone(ids, mask, capacity=capacity)[0]
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
            got.sin().mean().backward()
    assert counter.frame_count <= 2
    # After the step the module computes as ever.
    torch.testing.assert_close(backbone(ids, mask, capacity=64)[0], want, rtol=1e-5, atol=1e-5)


def test_static_shapes_are_compiled_one_by_one(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    monkeypatch.setenv("EMBEDLAB_KERNELS", "static=1")
    backbone = load(tiny, "bert").eval()
    ids, mask = batch()
    counter = CompileCounterWithBackend("eager")
    backbone.compile_blocks(backend=counter, dynamic=True, fullgraph=True)
    sizes = range(64, 64 + 8 * 11, 8)  # more than the compiler's usual limit
    for capacity in sizes:
        backbone(ids, mask, capacity=capacity)
    assert counter.frame_count == len(sizes)


def test_layers_that_are_more_than_a_product_are_left_alone(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EMBEDLAB_KERNELS", raising=False)
    backbone = load(tiny, "bert")
    attention = backbone.blocks[0].attention.self  # type: ignore[union-attr]
    assert joinable(attention, torch.bfloat16)
    attention.key.register_forward_hook(lambda *a: None)
    assert joinable(attention, torch.bfloat16) is None
    frozen = backbone.blocks[1].attention.self  # type: ignore[union-attr]
    frozen.value.requires_grad_(False)
    assert joinable(frozen, torch.bfloat16) is None
    assert joinable(nn.Linear(4, 4), torch.bfloat16) is None
