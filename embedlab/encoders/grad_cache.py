"""Cached gradients (GradCache, Gao et al. 2021): the in-batch loss of a large batch in a small one's memory.

The loss needs all vectors of the batch, but not all activations: rows are encoded in chunks that keep none,
and when the gradient of the loss reaches the vectors, each chunk is encoded once more and back-propagated:
one more forward pass. Random state (CPU and CUDA) and autocast are restored, and so are dropout masks.

Each chunk is one non-reentrant checkpoint, hence there is a single backward pass: loss scaling needs no care,
and a parameter's gradient becomes ready once, as data-parallel reducers want it. That restores random states on the
host, which a CUDA graph cannot: there both passes draw from states of their own, which begin alike (`RepeatedDraws`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from embedlab.errors import UserError
from embedlab.kernels.capture import capturing

R = TypeVar("R", Tensor, tuple[Tensor, ...])
_draws: RepeatedDraws | None = None


def cached(encode: Callable[..., R], *rows: Tensor, chunk: int | None) -> R:
    """``encode(*rows)`` by chunks of rows, whose activations are recomputed in the backward pass.

    Args:
        encode: from tensors ``[b, ...]`` to one tensor ``[b, ...]`` or a tuple of them; each row is on its
            own (no batch statistics).
        rows: ``[B, ...]`` each.
        chunk: rows at once. None, or no gradient wanted: one call on all rows.

    Returns:
        What ``encode(*rows)`` returns, ``[B, ...]``. Gradients are those of plain back-propagation through
        the same chunks; without dropout also those of one batch (dropout draws other masks for other shapes).
    """
    if chunk is None or not torch.is_grad_enabled():
        return encode(*rows)
    chunks = list(zip(*(r.split(chunk) for r in rows), strict=True))
    if _draws is not None:
        # The vectors depend on the weights, of which the function is not told: something else has to need a gradient.
        needs = torch.zeros((), device=rows[0].device, requires_grad=True)
        return _Twice.apply(needs, encode, chunks, *_draws.take())  # type: ignore[no-any-return]
    return _joined([checkpoint(encode, *part, use_reentrant=False) for part in chunks])  # type: ignore[return-value]


def _joined(parts: Sequence[Tensor | tuple[Tensor, ...]]) -> Tensor | tuple[Tensor, ...]:
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)  # type: ignore[arg-type]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


class _Twice(torch.autograd.Function):
    """Chunks encoded without a gradient, and again in the backward pass, which nothing has to restore beforehand."""

    @staticmethod
    def forward(
        ctx: Any,
        needs: Tensor,
        encode: Callable[..., Any],
        chunks: list[tuple[Tensor, ...]],
        first: torch.Generator,
        again: torch.Generator,
    ) -> Any:
        ctx.encode, ctx.chunks, ctx.again = encode, chunks, again
        ctx.set_materialize_grads(False)
        device = needs.device.type
        ctx.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        with drawing(first, needs.device):
            return _joined([encode(*part) for part in chunks])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        sizes = [len(part[0]) for part in ctx.chunks]
        pieces = zip(*((None,) * len(sizes) if g is None else g.split(sizes) for g in grads), strict=True)
        device, dtype, enabled = ctx.autocast
        with (
            torch.enable_grad(),
            torch.autocast(device, dtype, enabled=enabled, cache_enabled=False),
            drawing(ctx.again, ctx.chunks[0][0].device),
        ):
            for part, piece in zip(ctx.chunks, pieces, strict=True):
                vectors = ctx.encode(*part)
                vectors = (vectors,) if isinstance(vectors, Tensor) else vectors
                wanted = [(v, g) for v, g in zip(vectors, piece, strict=True) if g is not None]
                torch.autograd.backward([v for v, _ in wanted], [g for _, g in wanted])
        return None, None, None, None, None


class RepeatedDraws:
    """Pairs of random states of a CUDA device, of which both draw the same: one pair for each `cached` of a step.

    Args:
        device: CUDA.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pairs: list[tuple[torch.Generator, torch.Generator]] = []
        self._taken = 0

    @contextmanager
    def on(self) -> Iterator[None]:
        """`cached` takes its pairs from here, from the first on."""
        global _draws
        before, _draws, self._taken = _draws, self, 0
        try:
            yield
        finally:
            _draws = before

    def take(self) -> tuple[torch.Generator, torch.Generator]:
        if self._taken == len(self._pairs):
            self._pairs.append((torch.Generator(self.device), torch.Generator(self.device)))
        self._taken += 1
        return self._pairs[self._taken - 1]

    def register(self, graph: torch.cuda.CUDAGraph) -> None:
        """Each replay of the graph moves the states on; before it is captured, with all pairs taken once."""
        for pair in self._pairs:
            for generator in pair:
                graph.register_generator_state(generator)

    def captured(self, step: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """The graph of a small step, which is run once before, and what it gives in every replay."""
        stream, graph = torch.cuda.Stream(self.device), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        self.register(graph)
        with capturing(graph, stream=stream):
            out = step()
        return graph, out

    def renew(self) -> None:
        """Other draws from now on, which follow from the device's own state (a resumed run draws the same)."""
        if not self._pairs:
            return
        own = torch.cuda.default_generators[_index(self.device)]
        offset = own.get_offset()
        for i, pair in enumerate(self._pairs):
            for generator in pair:
                generator.manual_seed((own.initial_seed() + _STRIDE * (offset + 1) + _PAIR * i) % 2**63)
        own.set_offset(offset + 4)  # a draw's worth

    def check(self) -> None:
        """With all pairs taken once, before a step is captured.

        Raises:
            UserError: in a graph the second pass drops otherwise with this torch: its gradients would be wrong.
        """
        if self._pairs and (fault := _fault(self.device)):
            why = f"with torch {torch.__version__}, {fault} of a captured step"
            raise UserError(why, key="optimizer.chunk", fix="step=compile")


@cache
def _fault(device: torch.device) -> str:
    """What is wrong where a small graph does not drop the same in both passes, and otherwise in each of three replays.

    Returns:
        Empty: nothing.
    """
    draws, rows = RepeatedDraws(device), torch.eye(12, device=device)
    weight = torch.nn.Parameter(torch.ones(12, 64, device=device))

    def step() -> Tensor:
        weight.grad = None
        with draws.on():
            out = cached(lambda part: torch.nn.functional.dropout(part @ weight, 0.5), rows, chunk=5)
        out.sum().backward()
        return out.detach()

    graph, out = draws.captured(step)
    before = torch.zeros_like(out, dtype=torch.bool)
    for i in range(3):
        draws.renew()
        graph.replay()
        assert weight.grad is not None
        kept = out != 0
        apart = float((kept != (weight.grad != 0)).float().mean())  # a row has weights of its own
        if apart:
            return f"the second pass drops otherwise than the first ({apart:.0%} in replay {i + 1})"
        if torch.equal(kept, before):
            return f"replay {i + 1} drops as the one before"
        before = kept
    return ""


_STRIDE, _PAIR = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9  # ranks have seeds that follow one another


@contextmanager
def drawing(generator: torch.Generator, device: torch.device) -> Iterator[None]:
    """Operations on the device draw from this generator's state instead of the device's own."""
    own = torch.cuda.default_generators[_index(device)]
    before = own.graphsafe_get_state()
    own.graphsafe_set_state(generator)
    try:
        yield
    finally:
        own.graphsafe_set_state(before)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
