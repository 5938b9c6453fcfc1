"""Twin towers without padding, by modules and by kernels: streams and gradients of the padded towers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embedlab.backbones import Backbone
from embedlab.encoders.cross_attention import CrossAttention, Route, Streams
from embedlab.engine.precision import ComputeCopy
from embedlab.kernels import fused_block, fused_twin, varlen_attention
from tests.backbones.test_last_block import batch
from tests.interpreted import INTERPRETED, needs_triton
from tests.kernels.test_attention import load

Tiny = Callable[..., Path]
CROSSED = ((4,), (2, 4), (1, 2, 3, 4))
FUSED = ("bert", "roberta", "distilbert", "xlm-roberta")


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Off a card too; how often the kernels ran."""
    ran: list[int] = []
    states = fused_twin.states
    monkeypatch.setattr(fused_block, "applies", lambda backbone, device: fused_block.fusable(backbone))
    monkeypatch.setattr(fused_twin, "states", lambda *a, **k: [ran.append(1), states(*a, **k)][1])
    return ran


def towers(tiny: Tiny, model_type: str, **arch: int) -> tuple[Backbone, Backbone]:
    one, two = (load(tiny, model_type, layers=4, seed=seed, **arch).eval() for seed in (0, 1))
    return one, two


def padded_states(streams: Streams, mask: Tensor) -> list[Tensor]:
    """All states of all streams, ``[B, L, D]``, 0 at padding."""
    states = [x for pair in (streams.main or (), streams.side) for stream in pair for x in stream]
    if streams.slots is not None:
        states = list(streams.slots.unpack_all(states))
    return [x * mask[..., None] for x in states]


def gradients(pair: tuple[Backbone, Backbone], read: Callable[[], list[Tensor]]) -> dict[str, Tensor]:
    """What is read, and the gradients of all weights; of fp32 ones computed with copies, as a captured step does."""
    single = next(pair[0].parameters()).dtype == torch.float32
    copies = [ComputeCopy(backbone, torch.float32) for backbone in pair] if single else []
    with ExitStack() as stack:
        for twins in copies:
            stack.enter_context(twins.swapped())
        states = read()
        scales = torch.linspace(1, 2, len(states))
        sum(((x * s).sin().sum() for x, s in zip(states, scales, strict=True)), torch.zeros(())).backward()
    found = {f"state {i}": x.detach() for i, x in enumerate(states)}
    for twins in copies:
        twins.hand_over(add=False)
    for i, backbone in enumerate(pair):
        found |= {f"{i} {n}": p.grad.clone() for n, p in backbone.named_parameters() if p.grad is not None}
        backbone.zero_grad()
    return found


def same(got: dict[str, Tensor], want: dict[str, Tensor], share: float) -> None:
    """Up to a share of each tensor's largest value."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        error = float((got[name] - value).abs().max())
        assert error <= share * max(1.0, float(value.abs().max())), f"{name}: {error}"


@pytest.mark.parametrize("route", ["query_owner", "value_owner"])
@pytest.mark.parametrize("main", [True, False], ids=["side", "instream"])
@pytest.mark.parametrize("layers", CROSSED)
@pytest.mark.parametrize("model_type", [*FUSED, "modernbert"])
def test_without_padding_streams_and_gradients_are_those_of_padded_towers_in_fp64(
    tiny: Tiny,
    model_type: str,
    layers: tuple[int, ...],
    main: bool,
    route: Route,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, two = (backbone.double() for backbone in towers(tiny, model_type))
    pair = one, two
    ids, mask = batch()
    cross = CrossAttention(one, two, layers, route)

    def read(capacity: int | None) -> list[Tensor]:
        return padded_states(cross(ids, mask, main=main, capacity=capacity), mask)

    want = gradients(pair, lambda: read(None))
    same(gradients(pair, lambda: read(int(mask.sum()) + 7)), want, 1e-9)


@pytest.mark.parametrize("route", ["query_owner", "value_owner"])
@pytest.mark.parametrize("main", [True, False], ids=["side", "instream"])
@pytest.mark.parametrize("layers", CROSSED)
@pytest.mark.parametrize("model_type", FUSED)
def test_the_kernels_streams_are_those_of_padded_towers(
    tiny: Tiny, model_type: str, layers: tuple[int, ...], main: bool, route: Route, fused: list[int]
) -> None:
    pair = towers(tiny, model_type)
    ids, mask = batch("left")
    cross = CrossAttention(*pair, layers, route)

    def read(capacity: int | None) -> list[Tensor]:
        return padded_states(cross(ids, mask, main=main, capacity=capacity), mask)

    want = gradients(pair, lambda: read(None))
    same(gradients(pair, lambda: read(int(mask.sum()) + 7)), want, 2e-5)
    assert fused == [1]


@pytest.mark.parametrize("main", [True, False], ids=["side", "instream"])
def test_one_token_of_each_row_is_that_of_the_whole_last_block(
    tiny: Tiny, main: bool, fused: list[int]
) -> None:
    pair = towers(tiny, "bert")
    ids, mask = batch()
    position = torch.tensor([0, 3, 0, 6, 11, 2])
    cross = CrossAttention(*pair, (2, 4))

    def read(at: Tensor | None) -> list[Tensor]:
        streams = cross(ids, mask, main=main, capacity=int(mask.sum()) + 7, position=at)
        last = [s[-1] for part in (streams.main or (), streams.side) for s in part]
        if at is not None:
            assert streams.slots is None
            return [x[:, 0] for x in last]
        assert streams.slots is not None
        return [x[torch.arange(len(ids)), position] for x in streams.slots.unpack_all(last)]

    same(gradients(pair, lambda: read(position)), gradients(pair, lambda: read(None)), 2e-5)
    assert fused == [1, 1]


def test_streams_have_dropout_of_their_own_and_their_gradient(tiny: Tiny, fused: list[int]) -> None:
    """Along a random direction, by finite differences with the masks of one seed."""
    pair = towers(tiny, "bert")
    ids, mask = batch()
    cross = CrossAttention(*pair, (3, 4))

    def read() -> list[Tensor]:
        torch.manual_seed(3)
        return padded_states(cross(ids, mask, capacity=int(mask.sum()) + 7), mask)

    for backbone in pair:
        backbone.train()
    found = gradients(pair, read)
    states = [x for name, x in found.items() if name.startswith("state")]
    # Main and side streams of both towers, five states each: equal up to the fork, then apart.
    for main, side in zip(states[:10], states[10:], strict=True):
        assert torch.equal(main, side) or not torch.allclose(main, side, atol=1e-3)
    assert sum(torch.equal(a, b) for a, b in zip(states[:10], states[10:], strict=True)) == 6
    draw = torch.Generator().manual_seed(1)
    named = {
        f"{i} {n}": p for i, b in enumerate(pair) for n, p in b.named_parameters() if f"{i} {n}" in found
    }
    direction: Any = {
        n: torch.randn(p.shape, generator=draw) * p.detach().std().clamp(min=1e-2) for n, p in named.items()
    }
    inner = sum(float((found[n] * direction[n]).sum()) for n in named)
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            for n, p in named.items():
                p.add_(direction[n], alpha=sign * 1e-3)
        moved = [x for name, x in gradients(pair, read).items() if name.startswith("state")]
        scales = torch.linspace(1, 2, len(moved))
        values.append(sum(float((x * s).double().sin().sum()) for x, s in zip(moved, scales, strict=True)))
        with torch.no_grad():
            for n, p in named.items():
                p.sub_(direction[n], alpha=sign * 1e-3)
    assert inner == pytest.approx((values[0] - values[1]) / 2e-3, rel=3e-2)


@needs_triton
@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("route", ["query_owner", "value_owner"])
def test_the_interpreted_attention_kernel_exchanges_as_its_reference(
    tiny: Tiny, route: Route, fused: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from embedlab.kernels import varlen_triton

    pair = towers(tiny, "bert", width=32, heads=2, ffn=64)
    ids, mask = batch()
    cross = CrossAttention(*pair, (2, 4), route)

    def read() -> list[Tensor]:
        return padded_states(cross(ids, mask, capacity=int(mask.sum()) + 7), mask)

    want = gradients(pair, read)
    monkeypatch.setattr(varlen_attention, "_forward", varlen_triton.launch_forward)
    monkeypatch.setattr(varlen_attention, "_backward", varlen_triton.launch_backward)
    same(gradients(pair, read), want, 2e-5)
    assert fused == [1, 1]
