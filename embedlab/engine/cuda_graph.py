"""A whole training step as one CUDA graph for each batch shape.

At batch 64 a BERT-base step launches some two thousand kernels that take about 5 us each to start and less to
run; a graph starts them all at once. The graph holds the gathering of tokens, the forward pass, the losses, the
backward pass, what devices exchange, clipping and the update. Dropout differs between replays: the generator of the
device is registered with the graph, and each replay moves its offset on.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from embedlab.distributed.gather import world_size
from embedlab.encoders.grad_cache import RepeatedDraws
from embedlab.engine.meter import Meter
from embedlab.engine.module import Method
from embedlab.engine.optimizer import ReplayableAdamW
from embedlab.engine.step import StepRunner
from embedlab.engine.whole_step import Shapes, WholeStep, finalize_step
from embedlab.kernels.available import kernel_options
from embedlab.kernels.capture import capturing

_WARM_UPS = 2
"""Lazily compiled kernels, library handles and work spaces exist after the first; the second is quiet."""


class CapturedStep(StepRunner):
    """The whole step, from the gathering of tokens to the update, as one CUDA graph for each batch shape.

    Needs data that is resident on the device. Elsewhere than on CUDA, and with `KernelOptions.graph` off, the same work
    is done in the same order without a graph.
    """

    automatic = False
    compiles = True
    resident = True

    def __init__(self, packing: bool = False) -> None:
        super().__init__(packing)
        self.work: WholeStep | None = None
        # The number of true tokens has many values: one compilation for all of them.
        self.dynamic = packing

    def begin(self, method: Method) -> None:
        if self.work is not None:
            # Graphs of an earlier fit update memory where the weights no longer are.
            self.work = None
            method.meter = Meter()
        super().begin(method)

    def step(self, method: Method, batch: dict[str, Any]) -> None:
        optimizer: Any = method.optimizers()
        if self.work is None:
            captures = method.device.type == "cuda" and kernel_options().graph
            self.work = (StepGraphs if captures else WholeStep)(method, optimizer.optimizer)
        work = self.work
        if work.load(batch):
            optimizer.step()
            method.lr_schedulers().step()  # type: ignore[union-attr,call-arg]
        else:
            work.replay()
        assert work.shapes is not None
        self.packed_tokens = work.shapes.packed_tokens
        method.meter.add_sum(work.totals, work.names)

    def accumulating(self, method: Method) -> bool:
        loop = method.trainer.fit_loop.epoch_loop
        done = loop.batch_progress.current.ready % method.optimizer_config.accumulate == 0
        return not done and not loop._num_ready_batches_reached()

    def updates(self, method: Method) -> int:
        """A captured step adds batches up by itself, so the trainer takes each for an update."""
        steps = super().updates(method)  # first: it sets the trainer's number of batches
        trainer, accumulate = method.trainer, method.optimizer_config.accumulate
        batches, epochs, most = trainer.num_training_batches, trainer.max_epochs, trainer.max_steps
        if accumulate == 1 or epochs is None or epochs < 0 or math.isinf(batches):
            return steps
        updates = math.ceil(batches / accumulate) * epochs
        return max(1, updates if most < 0 else min(updates, most))

    def check(self) -> None:
        """Waits for the device."""
        if self.work is not None:
            self.work.check()

    def close(self) -> None:
        if self.work is not None:
            self.work.close()


class StepGraphs(WholeStep):
    """Replays the step of ``method``, and captures it for each shape that comes for the first time."""

    def __init__(self, method: Method, optimizer: ReplayableAdamW) -> None:
        super().__init__(method, optimizer)
        self._graphs: dict[Any, torch.cuda.CUDAGraph] = {}
        self._stream = torch.cuda.Stream()
        self.capture_arguments: dict[str, Any] = {
            "pool": torch.cuda.graph_pool_handle(),
            "stream": self._stream,
        }
        """Memory and stream of the graphs, which run one after another."""
        self._draws = RepeatedDraws(self.device)
        self._finalize_step = torch.compile(finalize_step, dynamic=False)

    def load(self, batch: dict[str, Any]) -> bool:
        updates = super().load(batch)
        shapes = self.shapes
        assert shapes is not None
        if shapes.key not in self._graphs:
            self._graphs[shapes.key] = self._capture(shapes)
        return updates

    def replay(self) -> None:
        assert self.shapes is not None
        self._before()
        self._draws.renew()
        self._graphs[self.shapes.key].replay()

    def close(self) -> None:
        """Graphs that hold messages end before the connection does, which would wait for them."""
        super().close()
        if self._graphs and world_size() > 1:
            torch.cuda.synchronize(self.device)
            self._graphs.clear()

    def _capture(self, shapes: Shapes) -> torch.cuda.CUDAGraph:
        """Warm up without any effect on weights, gradients or random state, then record."""
        _check_agreed(shapes, self.device)
        random_state = torch.cuda.get_rng_state(self.device)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            with self._computing(), self._left_as_it_was():
                for _ in range(_WARM_UPS):
                    loss, logged = self._loss(shapes)
                    with self._coming(shapes):
                        loss.backward()
            if len(self.totals) == 0:
                self.totals = torch.zeros(2, len(logged) + 1, device=self.device)
            # Compiled here, on copies: inside the capture it could not be.
            rows, bad_rows = (x.clone() for x in self._rows[shapes.rows])
            found_inf, totals = self.found_inf.clone(), self.totals.clone()
            loss, norm = loss.detach(), torch.ones_like(found_inf)
            # That two arguments are one tensor is a part of what is compiled.
            mean = loss if self._sum is None or not shapes.updates else loss.clone()
            self._finalize_step(
                loss, mean, norm, logged, rows, bad_rows, found_inf, totals, self._clip, shapes.updates
            )
            del loss, logged
        torch.cuda.current_stream().wait_stream(self._stream)
        self._draws.check()
        torch.cuda.set_rng_state(random_state, self.device)
        graph = torch.cuda.CUDAGraph()
        self._draws.register(graph)
        with capturing(graph, **self.capture_arguments):
            self._body(shapes)
        torch.cuda.set_rng_state(random_state, self.device)
        return graph

    def _loss(self, shapes: Shapes) -> tuple[Tensor, Tensor]:
        with self._draws.on():
            return super()._loss(shapes)

    @contextmanager
    def _left_as_it_was(self) -> Iterator[None]:
        """Gradients and buffers, such as a queue, are afterwards as they were before."""
        buffers = [(b, b.clone()) for b in self.method.buffers()]
        kept = [(p, p.grad) for p in self._direct]
        for p, _ in kept:
            p.grad = None
        try:
            yield
        finally:
            for buffer, before in buffers:
                buffer.copy_(before)
            for p, grad in kept:
                p.grad = grad
            for copy in self._copies:
                copy.clear()


def _check_agreed(shapes: Shapes, device: torch.device) -> None:
    """Raise where devices are about to capture different steps, whose messages would wait for each other for ever."""
    if world_size() == 1:
        return
    # The devices' own numbers of rows may differ, and are a part of what they agree upon.
    digest = hashlib.sha256(repr(shapes.key[1:]).encode()).digest()
    own = torch.tensor(list(digest[:8]), dtype=torch.int32, device=device)
    both = torch.cat([own, -own])
    dist.all_reduce(both, dist.ReduceOp.MAX)
    if not torch.equal(both[:8], -both[8:]):
        raise RuntimeError(f"the devices have batches of different shapes (here {shapes.key})")
