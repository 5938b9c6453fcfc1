"""Tokens without padding: the same hidden states, losses and gradients as padded rows, with few compilations."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from embedlab.backbones import Backbone
from embedlab.kernels.available import packed_kernel
from embedlab.kernels.packing import FullRows, Slots, row_capacity, token_capacity
from embedlab.kernels.varlen_attention import attention_function, padded_attention, varlen_attention
from tests.interpreted import needs_triton
from tests.kernels.test_attention import NoHostReads, load

Tiny = Callable[..., Path]
MODELS = ("bert", "roberta", "xlm-roberta", "distilbert")
DECODERS = ("llama", "qwen2", "mistral", "opt", "gpt_neox")
LENGTHS = (12, 5, 1, 7, 12, 3)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def batch(length: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(10, 200, (len(LENGTHS), length), generator=torch.Generator().manual_seed(0))
    return ids, (torch.arange(length) < torch.tensor(LENGTHS)[:, None]).long()


def gradients(backbone: Backbone, states: tuple[torch.Tensor, ...], mask: torch.Tensor) -> list[torch.Tensor]:
    loss = sum(((h * mask[..., None]).sin().mean() for h in states), torch.zeros(()))
    found = torch.autograd.grad(loss, list(backbone.parameters()), allow_unused=True)
    return [g for g in found if g is not None]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("model_type", [*MODELS, *DECODERS, "modernbert", "narrow"])
def test_states_and_gradients_are_those_of_padded_rows(tiny: Tiny, model_type: str, side: str) -> None:
    """In narrow sliding windows too, whose half is shorter than the rows."""
    narrow = {"local_attention": 6, "layers": 4} if model_type == "narrow" else {}
    backbone = load(tiny, "modernbert" if narrow else model_type, **narrow).eval()
    ids, mask = batch()
    mask = mask if side == "right" else mask.flip(1)
    padded = backbone(ids, mask, all_layers=True)
    for capacity in (int(mask.sum()), 64, 640):  # more slots than the model has positions
        packed = backbone(ids, mask, all_layers=True, capacity=capacity)
        assert len(packed) == len(padded)
        for want, got in zip(padded, packed, strict=True):
            torch.testing.assert_close(got, want * mask[..., None], rtol=1e-5, atol=1e-5)
        one = gradients(backbone, backbone(ids, mask), mask)
        other = gradients(backbone, backbone(ids, mask, capacity=capacity), mask)
        for want, got in zip(one, other, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_positions_of_a_model_that_takes_none(tiny: Tiny) -> None:
    backbone = load(tiny, "distilbert").eval()
    ids, mask = batch()
    want = backbone(ids, mask, capacity=64)[0]
    backbone._takes_positions = False
    torch.testing.assert_close(backbone(ids, mask, capacity=64)[0], want)


@pytest.mark.parametrize("model_type", [*MODELS, "modernbert"])
def test_full_rows_are_packed_as_they_are(tiny: Tiny, model_type: str) -> None:
    backbone = load(tiny, model_type).eval()
    ids, _ = batch()
    ones = torch.ones_like(ids)
    padded = backbone(ids, ones, all_layers=True)
    packed = backbone(ids, None, all_layers=True, capacity=1)
    torch.testing.assert_close(packed, padded, rtol=1e-5, atol=1e-5)
    one, other = (gradients(backbone, states, ones) for states in (padded, packed))
    torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)
    slots, full = Slots(ones, ids.numel()), FullRows(ids)
    for name in ("cell", "index", "bounds"):
        assert torch.equal(getattr(full, name), getattr(slots, name))
    position = torch.tensor([3, 0, 11, 5, 5, 1])
    assert all(torch.equal(a, b) for a, b in zip(full.of(position), slots.of(position), strict=True))
    two = torch.stack([position, position.flip(0)], 1)
    for some in (full, slots):
        slot, real = some.of(two)
        for k in range(2):
            assert all(
                torch.equal(a, b) for a, b in zip((slot[:, k], real[:, k]), some.of(two[:, k]), strict=True)
            )
    assert torch.equal(full.pack(ids, 7), slots.pack(ids, 7))


def test_the_kernel_refuses_rows_that_reach_out_of_their_window(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embedlab.backbones.backbone.packed_kernel", lambda config, longest: longest <= 128)
    modern, bert = load(tiny, "modernbert", local_attention=34), load(tiny, "bert")
    # Half a window is 17 tokens to each side; kernels have room for 16 or 32.
    assert [modern.unpads(n) for n in (8, 16, 17, 18, 64)] == [True, True, False, False, False]
    assert [bert.unpads(n) for n in (64, 512, 513)] == [True, True, False]
    assert [load(tiny, "llama").unpads(n) for n in (128, 129)] == [True, False]
    inputs = [torch.randn(1, 2, 24, 16, device="meta") for _ in range(3)]
    with pytest.raises(ValueError, match="reach out"):
        attention_function(
            torch.nn.Identity(), *(_Card(x) for x in inputs), None, cu_seq_lens_q=torch.tensor([0, 24]),
            max_length_q=32, sliding_window=18,
        )  # type: ignore[arg-type]  # fmt: skip


class _Card:
    """A tensor that says it is on a card."""

    def __init__(self, x: torch.Tensor) -> None:
        self.shape, self.is_cuda = x.shape, True


def test_dropout_differs_between_rows_and_calls(tiny: Tiny) -> None:
    backbone = load(tiny, "bert").train()
    ids, mask = batch()
    ids[5], mask[5] = ids[0], mask[0]
    first = backbone(ids, mask, capacity=64)[0]
    assert not torch.allclose(first[0], first[5])
    assert not torch.allclose(first, backbone(ids, mask, capacity=64)[0])


@pytest.mark.parametrize("model_type", [*MODELS, *DECODERS, "modernbert"])
def test_the_host_waits_for_nothing_and_one_compilation_serves_all_capacities(
    tiny: Tiny, model_type: str
) -> None:
    modern = model_type == "modernbert"
    backbone = load(tiny, model_type, **({"layers": 4} if modern else {})).train()
    counter = CompileCounterWithBackend("aot_eager")
    backbone.compile_blocks(backend=counter, dynamic=True, fullgraph=True)
    for length, capacity in ((12, 64), (12, 128), (16, 192), (12, 256), (32, 320)):
        ids, mask = batch(length)
        backbone(ids, mask, capacity=capacity)[0].sin().sum().backward()
    # ModernBERT's first block has no norm, and some see all of a row.
    assert counter.frame_count <= (6 if modern else 2)


def test_static_shapes_are_compiled_one_by_one(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBEDLAB_KERNELS", "static=1")
    backbone = load(tiny, "bert").eval()
    ids, mask = batch()
    counter = CompileCounterWithBackend("eager")
    backbone.compile_blocks(backend=counter, dynamic=True, fullgraph=True)
    sizes = range(64, 64 + 8 * 11, 8)  # more than the compiler's usual limit
    for capacity in sizes:
        backbone(ids, mask, capacity=capacity)
    assert counter.frame_count == len(sizes)


def test_packing_reads_no_value_on_the_host() -> None:
    ids, mask = batch()
    states = torch.randn(1, 64, 8, requires_grad=True)
    with NoHostReads():
        slots = Slots(mask, 64)
        packed = slots.pack(ids, 7)
        slots.unpack(states).sum().backward()
    assert packed[0, : sum(LENGTHS)].tolist() == ids[mask.bool()].tolist()
    assert set(packed[0, sum(LENGTHS) :].tolist()) == {7}
    assert slots.bounds.tolist() == [0, 12, 17, 18, 25, 37, 40]
    assert states.grad is not None
    assert states.grad[0, :, 0].tolist() == [1.0] * 40 + [0.0] * 24


def test_capacities_are_few_and_enough() -> None:
    for tokens in (1, 63, 64, 65, 1650, 13_200, 100_000):
        capacity = token_capacity(tokens)
        assert tokens <= capacity <= max(tokens + 63, tokens * 33 // 32)
    assert len({token_capacity(t) for t in range(12_700, 13_700)}) <= 5
    assert [row_capacity(n) for n in (1, 8, 9, 32, 33, 128)] == [8, 8, 16, 32, 64, 128]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_reference_agrees_with_autograd(dropout: float) -> None:
    bounds = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, 10, 4, generator=draw, requires_grad=True) for _ in range(3))
    arguments: tuple[Any, ...] = (q, k, v, bounds, torch.tensor([5]), 8, 0.5, dropout)
    out = varlen_attention(*arguments)
    assert out[:, :, 8:].abs().max() == 0
    torch.library.opcheck(varlen_attention, arguments)
    grads = torch.autograd.grad(out.sin().sum(), (q, k, v))
    for x, grad in zip((q, k, v), grads, strict=True):
        step = torch.zeros_like(x)
        step[0, 1, 4, 2] = 1e-2
        moved = [
            varlen_attention(*(a + sign * step if a is x else a for a in arguments)).sin().sum()
            for sign in (1, -1)
        ]
        assert (moved[0] - moved[1]).item() / 2e-2 == pytest.approx(
            grad[0, 1, 4, 2].item(), rel=2e-2, abs=2e-3
        )


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], causal: bool
) -> torch.Tensor:
    """Row by row and head by head, ``[1, H, C, D]``; scores are halved."""
    out, group, start = torch.zeros_like(q), q.shape[1] // k.shape[1], 0
    for n in lengths:
        row = slice(start, start + n)
        for h in range(q.shape[1]):
            scores = 0.5 * q[0, h, row] @ k[0, h // group, row].T
            if causal:
                scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
            out[0, h, row] = scores.softmax(-1) @ v[0, h // group, row]
        start += n
    return out


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 2), (3, 1)]),
    unused=st.integers(0, 5),
    causal=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_attention_is_that_of_each_row_by_itself(
    lengths: list[int], heads: tuple[int, int], unused: int, causal: bool
) -> None:
    """Values and gradients: rows padded for attention alone in fp64, the operator in fp32."""
    draw = torch.Generator().manual_seed(sum(lengths))
    bounds = torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()
    used = sum(lengths)
    shapes = [(1, n, used + unused, 4) for n in (heads[0], heads[1], heads[1])]
    inputs = [torch.randn(s, generator=draw, dtype=torch.float64, requires_grad=True) for s in shapes]
    grad = torch.randn(shapes[0], generator=draw, dtype=torch.float64)
    grad[:, :, used:] = 0

    def found(out: torch.Tensor, of: list[torch.Tensor]) -> list[torch.Tensor]:
        return [out[:, :, :used], *torch.autograd.grad(out, of, grad.to(out.dtype))]

    want = found(attend(*inputs, lengths, causal), inputs)
    padded = found(padded_attention(*inputs, bounds, 0.5, 0.0, causal), inputs)
    torch.testing.assert_close(padded, want, rtol=1e-10, atol=1e-10)
    single = [x.detach().float().requires_grad_() for x in inputs]
    operator = varlen_attention(*single, bounds, torch.tensor([5]), max(lengths), 0.5, 0.0, causal)
    assert operator[:, :, used:].abs().sum() == 0
    for mine, its in zip(found(operator, single), want, strict=True):
        torch.testing.assert_close(mine, its.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("unused", [0, 3])
def test_rows_padded_for_attention_alone_give_the_references_gradients(unused: int) -> None:
    bounds = torch.tensor([0, 3, 3, 8], dtype=torch.int32)  # a row without tokens too
    draw = torch.Generator().manual_seed(1)
    joint = torch.randn(1, 8 + unused, 3, 2, 4, generator=draw, requires_grad=True)
    found = []
    for fast in (False, True):
        q, k, v = (x.transpose(1, 2) for x in joint.unbind(2))
        if fast:
            out = padded_attention(q, k, v, bounds, 0.5, 0.0)[:, :, :8]
        else:
            out = varlen_attention(q, k, v, bounds, torch.tensor([5]), 8, 0.5, 0.0)[:, :, :8]
        found.append((out, *torch.autograd.grad(out.sin().sum(), joint)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


_KERNEL = """
import torch
from embedlab.kernels import varlen_triton as kernel
from embedlab.kernels.varlen_attention import heads_first, varlen_attention, varlen_attention_backward

torch.manual_seed(0)
single, half = torch.float32, torch.float16
for rows, heads, shared, width, longest, causal, dtype in (
    (5, 2, 2, 16, 12, False, single), (3, 1, 1, 64, 40, False, single),
    (4, 6, 2, 16, 12, True, single), (3, 3, 1, 64, 20, True, half), (4, 4, 2, 16, 12, False, half),
):
    close = dict(rtol=1e-4, atol=1e-5) if dtype is single else dict(rtol=2e-2, atol=2e-2)
    lengths = torch.randint(0, longest + 1, (rows,))
    lengths[0] = longest
    slots = int(lengths.sum()) + 37
    bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    joint = torch.randn(slots, heads + 2 * shared, width).to(dtype)
    q, k, v = (x.transpose(0, 1)[None] for x in joint.split((heads, shared, shared), 1))
    seed = torch.tensor([3])
    garbage = lambda x: heads_first(x).fill_(float("nan"))
    want = varlen_attention(q, k, v, bounds, seed, longest, 0.3, 0.0, causal)
    out = garbage(q)
    kernel.launch_forward(q, k, v, bounds, seed, out, longest, 0.3, 0.0, causal)
    torch.testing.assert_close(out, want, **close)
    grad, grads = torch.randn_like(want), [garbage(x) for x in (q, k, v)]
    kernel.launch_backward(q, k, v, bounds, seed, grad, *grads, longest, 0.3, 0.0, causal=causal)
    wanted = varlen_attention_backward(grad, q, k, v, bounds, seed, longest, 0.3, 0.0, causal)
    torch.testing.assert_close(tuple(grads), wanted, **close)
    # With dropout the output is linear in v: the gradient at v says whether both passes draw alike.
    outs = []
    for _ in range(2):
        out = garbage(q)
        kernel.launch_forward(q, k, v, bounds, seed, out, longest, 0.3, 0.3, causal)
        outs.append(out)
    assert torch.equal(*outs) and not torch.allclose(outs[0], want)
    kernel.launch_backward(q, k, v, bounds, seed, grad, *grads, longest, 0.3, 0.3, causal=causal)
    sums = [(a.double() * b.double()).sum() for a, b in ((grads[2], v), (out, grad))]
    torch.testing.assert_close(*sums, rtol=1e-3 if dtype is single else 2e-2, atol=1e-3 if dtype is single else 0.5)
"""


@needs_triton
def test_the_kernel_in_tritons_interpreter_is_the_reference() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _KERNEL],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


HEADS = pytest.mark.parametrize(
    ("heads", "shared", "width", "causal"),
    [(4, 4, 64, False), (9, 3, 64, True), (4, 1, 128, True), (4, 2, 32, False)],
)


def on_the_card(
    longest: int, heads: int, shared: int, width: int, dtype: torch.dtype
) -> tuple[list[torch.Tensor], torch.Tensor, list[int], torch.Tensor]:
    """Queries, keys and values on the card, bounds, the rows' lengths, and a gradient."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, longest + 1, (9,), generator=draw)
    slots = int(lengths.sum()) + 70
    bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int().cuda()
    sizes = heads, shared, shared, heads
    *inputs, grad = (
        torch.randn(slots, n, width, generator=draw).transpose(0, 1)[None].to("cuda", dtype) for n in sizes
    )
    return [x.requires_grad_() for x in inputs], bounds, lengths.tolist(), grad


@pytest.mark.gpu
@HEADS
@pytest.mark.parametrize("longest", [16, 32, 64, 128])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 2e-5), (torch.bfloat16, 5e-2)])
def test_the_kernel_on_the_card_is_attention_in_fp64(
    longest: int, heads: int, shared: int, width: int, causal: bool, dtype: torch.dtype, close: float
) -> None:
    """Values and gradients. TF32, which Triton takes by default, is off by 1e-3."""
    if dtype == torch.float32 and (longest, width) == (128, 128):
        pytest.skip("`packed_kernel` refuses it")
    inputs, bounds, lengths, grad = on_the_card(longest, heads, shared, width, dtype)
    seed = torch.tensor([3], device="cuda")
    out = varlen_attention(*inputs, bounds, seed, longest, 0.5, 0.0, causal)
    assert out[:, :, sum(lengths) :].abs().sum() == 0
    exact = [x.detach().double().cpu().requires_grad_() for x in inputs]
    want = attend(*exact, lengths, causal)
    torch.testing.assert_close(out.double().cpu(), want, rtol=close, atol=close)
    grads = torch.autograd.grad(out, inputs, grad)
    for mine, its in zip(grads, torch.autograd.grad(want, exact, grad.double().cpu()), strict=True):
        torch.testing.assert_close(mine.double().cpu(), its, rtol=close, atol=close * its.abs().max().item())


@pytest.mark.gpu
@HEADS
@pytest.mark.parametrize("longest", [32, 64, 128])
def test_dropout_on_the_card_is_drawn_alike_in_both_passes(
    longest: int, heads: int, shared: int, width: int, causal: bool
) -> None:
    """The output is linear in v, so that its gradient there says so."""
    inputs, bounds, _, grad = on_the_card(longest, heads, shared, width, torch.float32)
    out = varlen_attention(*inputs, bounds, torch.tensor([3], device="cuda"), longest, 0.125, 0.3, causal)
    (of_v,) = torch.autograd.grad(out, inputs[2:], grad)
    assert (of_v * inputs[2]).sum().item() == pytest.approx((out * grad).sum().item(), rel=1e-3, abs=1e-2)


@pytest.mark.parametrize(
    ("config", "longest", "packed"),
    [
        ({"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}, 128, True),
        ({"num_attention_heads": 12, "hidden_size": 768}, 128, True),
        ({"num_attention_heads": 12, "hidden_size": 768}, 129, False),
        ({"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256}, 64, False),
        ({"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}, 64, True),
        ({"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}, 65, False),
        ({}, 16, False),
    ],
)
def test_which_heads_the_kernel_takes(
    config: dict[str, int], longest: int, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("embedlab.kernels.available.has_triton", lambda: True)
    assert packed_kernel(SimpleNamespace(**config), longest) == packed
