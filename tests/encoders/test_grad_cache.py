"""Cached gradients are the gradients: chunked and unchunked, with dropout, and in the memory of one chunk."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from embedlab.encoders import grad_cache
from embedlab.encoders.grad_cache import RepeatedDraws, cached
from embedlab.errors import UserError
from embedlab.objectives.info_nce import info_nce

BATCH = 7


def _encoder(dropout: float) -> nn.Sequential:
    torch.manual_seed(0)
    first, second, last = nn.Linear(5, 16), nn.Linear(16, 16), nn.Linear(16, 4)
    layers = [first, nn.GELU(), nn.Dropout(dropout), second, nn.Dropout(dropout), last]
    return nn.Sequential(*layers).double().train()


def _gradients(encoder: nn.Module, vectors: Tensor, scale: float = 1.0) -> list[Tensor]:
    encoder.zero_grad()
    positives = vectors.roll(1, 1) * 0.5 + vectors * 0.7
    (scale * info_nce(vectors, positives, 0.05).loss).backward()
    return [p.grad.clone() for p in encoder.parameters() if p.grad is not None]


def _inputs() -> Tensor:
    return torch.randn(BATCH, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("chunk", [1, 3, BATCH, 100])
def test_equals_one_batch_without_dropout(chunk: int) -> None:
    encoder, x = _encoder(0.0), _inputs()
    whole = _gradients(encoder, encoder(x))
    parts = _gradients(encoder, cached(encoder, x, chunk=chunk))
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 3, BATCH])
def test_replays_dropout(chunk: int) -> None:
    """Against plain autograd through the same chunks, which keeps every activation."""
    encoder, x = _encoder(0.1), _inputs()
    torch.manual_seed(5)
    plain = torch.cat([encoder(part) for part in x.split(chunk)])
    expected = _gradients(encoder, plain)
    torch.manual_seed(5)
    vectors = cached(encoder, x, chunk=chunk)
    torch.rand(3)  # what happens between the passes must not matter
    found = _gradients(encoder, vectors)
    torch.testing.assert_close(vectors, plain)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_one_chunk_is_the_plain_step_with_dropout() -> None:
    encoder, x = _encoder(0.1), _inputs()
    torch.manual_seed(5)
    expected = _gradients(encoder, encoder(x))
    torch.manual_seed(5)
    found = _gradients(encoder, cached(encoder, x, chunk=BATCH))
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_random_state_afterwards_is_that_of_a_plain_step() -> None:
    encoder, x = _encoder(0.1), _inputs()
    torch.manual_seed(5)
    _gradients(encoder, torch.cat([encoder(part) for part in x.split(3)]))
    expected = torch.rand(4)
    torch.manual_seed(5)
    _gradients(encoder, cached(encoder, x, chunk=3))
    torch.testing.assert_close(torch.rand(4), expected)


def test_follows_the_incoming_gradient() -> None:
    """Loss scaling multiplies it; a cached loss that starts its own backward pass would lose the factor."""
    encoder, x = _encoder(0.0), _inputs()
    once = _gradients(encoder, cached(encoder, x, chunk=3))
    scaled = _gradients(encoder, cached(encoder, x, chunk=3), scale=1024.0)
    for a, b in zip(once, scaled, strict=True):
        torch.testing.assert_close(1024.0 * a, b)


def test_two_outputs_and_two_inputs() -> None:
    encoder, x = _encoder(0.0), _inputs()

    def views(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return encoder(a), encoder(a + b)

    expected = _gradients(encoder, sum(views(x, 2 * x)))
    found = _gradients(encoder, sum(cached(views, x, 2 * x, chunk=2)))
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_a_parameter_becomes_ready_once() -> None:
    """Data-parallel reducers count on it: a second signal for one parameter is an error there."""
    encoder, x = _encoder(0.1), _inputs()
    ready: list[int] = []
    for p in encoder.parameters():
        p.register_post_accumulate_grad_hook(lambda p: ready.append(id(p)))
    _gradients(encoder, cached(encoder, x, chunk=2))
    assert sorted(ready) == sorted(id(p) for p in encoder.parameters())


def test_activations_of_one_chunk_at_a_time() -> None:
    class Watched(torch.autograd.Function):
        alive: ClassVar[weakref.WeakSet[Tensor]] = weakref.WeakSet()
        most = 0

        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            kept = x * 2
            ctx.save_for_backward(kept)  # type: ignore[attr-defined]
            Watched.alive.add(kept)
            return kept + 1

        @staticmethod
        def backward(ctx: object, *grads: Tensor) -> Tensor:
            (kept,) = ctx.saved_tensors  # type: ignore[attr-defined]
            Watched.most = max(Watched.most, sum(len(t) for t in Watched.alive))
            return grads[0] * kept

    linear, x = nn.Linear(5, 4), _inputs().float()
    cached(lambda part: Watched.apply(linear(part)), x, chunk=2).square().sum().backward()
    assert Watched.most == 2
    Watched.most = 0
    Watched.apply(linear(x)).square().sum().backward()
    assert Watched.most == BATCH


def test_without_gradient_it_is_one_call() -> None:
    calls: list[int] = []

    def encode(x: Tensor) -> Tensor:
        calls.append(len(x))
        return x

    with torch.no_grad():
        cached(encode, _inputs(), chunk=2)
    cached(encode, _inputs(), chunk=None)
    assert calls == [BATCH, BATCH]


@pytest.mark.gpu
def test_replays_dropout_on_cuda() -> None:
    encoder, x = _encoder(0.1).cuda(), _inputs().cuda()
    torch.manual_seed(5)
    expected = _gradients(encoder, torch.cat([encoder(part) for part in x.split(3)]))
    torch.manual_seed(5)
    vectors = cached(encoder, x, chunk=3)
    torch.rand(3, device="cuda")
    found = _gradients(encoder, vectors)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


# ---- as a graph holds it


@contextmanager
def _drawing(generator: torch.Generator, device: torch.device) -> Iterator[None]:
    """`grad_cache.drawing` for the CPU."""
    before = torch.get_rng_state()
    torch.set_rng_state(generator.get_state())
    yield
    generator.set_state(torch.get_rng_state())
    torch.set_rng_state(before)


@pytest.mark.parametrize("chunk", [1, 3, BATCH, 100])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_graph_computes_the_same_gradients(
    chunk: int, dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against plain autograd through the same chunks with the same draws; two calls in a step, of two outputs each."""
    monkeypatch.setattr(grad_cache, "drawing", _drawing)
    encoder, x = _encoder(dropout), _inputs()

    def views(part: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return encoder(part), encoder(other)

    def loss(*outputs: Tensor) -> Tensor:
        return sum((o * (i + 1)).sin().sum() for i, o in enumerate(outputs))  # type: ignore[return-value]

    def plainly(draws: torch.Generator, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        with _drawing(draws, x.device):
            parts = [views(*p) for p in zip(*(i.split(chunk) for i in inputs), strict=True)]
        return torch.cat([a for a, _ in parts]), torch.cat([b for _, b in parts])

    draws = RepeatedDraws(torch.device("cpu"))
    draws._pairs = [(torch.Generator().manual_seed(i), torch.Generator().manual_seed(i)) for i in range(2)]
    with draws.on():
        z = cached(views, x, 2 * x, chunk=chunk), cached(views, 3 * x, x, chunk=chunk)
    value = loss(*z[0], *z[1])
    value.backward()
    found = [p.grad.clone() for p in encoder.parameters() if p.grad is not None]
    encoder.zero_grad()
    states = [torch.Generator().manual_seed(i) for i in range(2)]
    wanted = loss(*plainly(states[0], x, 2 * x), *plainly(states[1], 3 * x, x))
    wanted.backward()
    assert value.item() == wanted.item()
    for one, p in zip(found, encoder.parameters(), strict=True):
        torch.testing.assert_close(one, p.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_compiled_attention_drops_the_same_in_both_passes(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output is linear in the weight of the values, so that with one mask <weight, gradient> = <z, z>."""
    draws, cuda = RepeatedDraws(torch.device(device)), device == "cuda"
    if not cuda:
        monkeypatch.setattr(grad_cache, "drawing", _drawing)
        draws._pairs = [(torch.Generator().manual_seed(3), torch.Generator().manual_seed(3))]
    dtype = torch.bfloat16 if cuda else torch.float64
    torch.manual_seed(0)
    x = torch.randn(BATCH, 2, 24, 16, device=device, dtype=dtype)
    mask = torch.zeros(BATCH, 1, 24, 24, device=device, dtype=dtype)
    mask[..., 20:] = float("-inf")
    weight = nn.Parameter(torch.randn(16, 16, device=device, dtype=dtype))

    def attend(rows: Tensor, seen: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(rows, rows, rows @ weight, seen, 0.4).float()

    with draws.on():
        z = cached(torch.compile(attend, backend="inductor" if cuda else "aot_eager"), x, mask, chunk=3)
    (z.square().sum() / 2).backward()
    assert weight.grad is not None
    inner = float((weight.grad.float() * weight.detach().float()).sum())
    assert inner == pytest.approx(float(z.detach().square().sum()), rel=0.02 if cuda else 1e-5)


def test_a_torch_that_drops_otherwise_in_a_graphs_second_pass_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draws = RepeatedDraws(torch.device("cuda", 0))
    monkeypatch.setattr(grad_cache, "_fault", lambda device: "the second pass drops otherwise")
    draws.check()  # a step without cached gradients took no pair
    draws._pairs.append((torch.Generator(), torch.Generator()))
    with pytest.raises(UserError, match=r"second pass drops otherwise of a captured step.*step=compile"):
        draws.check()


@pytest.mark.gpu
def test_a_small_graph_drops_the_same_in_both_passes() -> None:
    assert grad_cache._fault(torch.device("cuda", 0)) == ""
