"""A whole training step as one CUDA graph for each batch shape.

At batch 64 a BERT-base step launches some two thousand kernels that take about 5 us each to start and less to
run; a graph starts them all at once. The graph holds the gathering of tokens, the forward pass, the losses, the
backward pass, clipping and the update. Dropout differs between replays: the generator of the device is registered
with the graph, and each replay moves its offset on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from embedlab.engine.fused_adamw import FusedUpdate, total_norm, usable
from embedlab.engine.meter import Meter
from embedlab.engine.module import Method
from embedlab.engine.optimizer import ReplayableAdamW
from embedlab.engine.precision import ComputeCopy, copyable
from embedlab.engine.step import StepRunner, backbones_of, non_finite
from embedlab.kernels.packing import row_capacity, token_capacity
from embedlab.objectives.precision import compiled_objectives

_WARM_UPS = 2
"""Lazily compiled kernels, library handles and work spaces exist after the first; the second is quiet."""

_CLIP_EPS = 1e-6  # as in torch.nn.utils.clip_grads_with_norm_


class CapturedStep(StepRunner):
    """The whole step, from the gathering of tokens to the update, as one CUDA graph for each batch shape.

    Needs one CUDA device and data that is resident on it.
    """

    automatic = False
    compiles = True

    def __init__(self, packing: bool = False) -> None:
        super().__init__(packing)
        self.graphs: StepGraphs | None = None
        # The number of true tokens has many values: one compilation for all of them.
        self.dynamic = packing

    def begin(self, method: Method) -> None:
        if self.graphs is not None:
            # Graphs of an earlier fit update memory where the weights no longer are.
            self.graphs = None
            method.meter = Meter()
        super().begin(method)

    def step(self, method: Method, batch: dict[str, Any]) -> None:
        optimizer: Any = method.optimizers()
        if self.graphs is None:
            self.graphs = StepGraphs(method, optimizer.optimizer)
        graphs = self.graphs
        if graphs.load(batch):
            optimizer.step()
            method.lr_schedulers().step()  # type: ignore[union-attr,call-arg]
        else:
            graphs.replay()
        self.packed_tokens = graphs.packed_tokens
        method.meter.add_sum(graphs.totals, graphs.names)

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
        if self.graphs is not None:
            self.graphs.check()


class StepGraphs:
    """Replays the step of ``method``; one instance a fit.

    A loss or gradient that is not finite makes the captured update skip itself from then on (the flag that loss
    scaling uses), so the weights stay those before it until the host sees the flag and stops the run.
    """

    def __init__(self, method: Method, optimizer: ReplayableAdamW) -> None:
        self.method = method
        self.optimizer = optimizer
        self.device = method.device
        self.accumulate = method.optimizer_config.accumulate
        self.parameters = method.trained()
        self.rows: Tensor | None = None
        self.names: list[str] = []
        self.totals = torch.zeros(0)
        self.found_inf = torch.zeros((), device=self.device)
        self.bad_rows: Tensor | None = None
        self._graphs: dict[Any, torch.cuda.CUDAGraph] = {}
        self._stream = torch.cuda.Stream()
        self.capture_arguments: dict[str, Any] = {
            "pool": torch.cuda.graph_pool_handle(), "stream": self._stream, "capture_error_mode": "thread_local",
        }  # fmt: skip
        """Of `torch.cuda.graph`: memory and stream of the graphs, which run one after another.

        Only calls of the capturing thread can spoil a capture: the loader's thread goes on pinning memory meanwhile.
        """
        self._current: torch.cuda.CUDAGraph | None = None
        self.packed_tokens: int | None = None
        """Tokens that one pass over the present batch computes, where padding is left out."""
        self._token_budgets: dict[str, int] | None = None
        self._packs = cache(partial(packs, method))
        self._dtype = {"bf16-mixed": torch.bfloat16}.get(str(method.trainer.precision))
        self._backbones = backbones_of(method)
        # A frozen one may be a moving average, whose copy would stay behind: autocast casts it.
        trained = [b for b in self._backbones if any(p.requires_grad for p in b.parameters())]
        self._copies = [
            ComputeCopy(b, self._dtype) for b in trained if self._dtype is not None and copyable(b)
        ]
        self._twins = {
            id(p): t for copy in self._copies for p, t in zip(copy.masters, copy.twins, strict=True)
        }
        self._direct = [p for p in self.parameters if id(p) not in self._twins]
        steps = _prepare(optimizer, self.device)
        self._update: FusedUpdate | None = None
        if self._copies and usable(self.parameters):
            self._update = FusedUpdate(
                optimizer, steps, lambda p: self._twins.get(id(p)), fp32_gradients=self.accumulate > 1
            )
        self._clip = method.optimizer_config.clip
        compiled = self.device.type == "cuda"
        self._finalize_step = torch.compile(finalize_step, dynamic=False) if compiled else finalize_step
        optimizer.found_inf = self.found_inf  # type: ignore[attr-defined]
        optimizer.replay = self.replay
        if self.accumulate > 1:
            for p in self.parameters:
                p.grad = torch.zeros_like(p)

    def load(self, batch: dict[str, Any]) -> bool:
        """Bring a batch's row numbers to the device; True when its replay ends in an update."""
        rows: Tensor = batch["rows"]
        if self.rows is None:
            self.rows = torch.zeros_like(rows, device=self.device)
            self.bad_rows = torch.full_like(self.rows, -1)
        if rows.shape != self.rows.shape:
            raise ValueError(
                f"a captured step needs batches of one size, got {len(rows)} after {len(self.rows)}"
            )
        self.rows.copy_(rows, non_blocking=True)
        updates = not self.method.runner.accumulating(self.method)
        lengths, budgets = batch["lengths"], None
        if self._packs(self.method.longest(lengths)):
            lengths, budgets = joint_shapes(lengths, batch["token_budgets"])
        self.packed_tokens = None if budgets is None else sum(budgets.values())
        self._token_budgets = budgets
        # Of token budgets only the sum: methods that leave out padding have all views in one pass.
        key = (tuple(sorted(lengths.items())), self.packed_tokens, updates)
        if key not in self._graphs:
            self._graphs[key] = self._capture(lengths, updates)
        self._current = self._graphs[key]
        return updates

    def replay(self) -> None:
        assert self._current is not None
        if self._update is not None:
            self._update.fill()
            self.refresh()  # a checkpoint or the best weights may have been loaded meanwhile
        self._current.replay()

    def refresh(self) -> None:
        """What the forward pass computes with is the present weights."""
        for copy in self._copies:
            if self._update is None:
                copy.refresh()
            else:  # the update writes it
                copy.refresh_if_written()

    @contextmanager
    def scoring(self, longest: int) -> Iterator[None]:
        """The encoder computes as in a step, for rows of at most `longest` tokens; `refresh` first."""
        with (
            self._computing(longest),
            torch.autocast("cuda", dtype=self._dtype, enabled=self._dtype is not None, cache_enabled=False),
        ):
            yield

    def check(self) -> None:
        """Raise ``NonFiniteLoss`` if any step since the start was not finite (waits for the device)."""
        if self.found_inf.item() and self.bad_rows is not None:
            raise non_finite(self.method, self.bad_rows.tolist())

    def _loss(self, lengths: dict[str, int]) -> tuple[Tensor, Tensor]:
        resident: Any = self.method.trainer.datamodule.resident(self.device)  # type: ignore[attr-defined]
        batch = resident.gather(self.rows, lengths, self._token_budgets)
        # Autocast's cache of cast weights would tie one graph to the memory of another.
        with (
            torch.autocast("cuda", dtype=self._dtype, enabled=self._dtype is not None, cache_enabled=False),
            compiled_objectives(self.device.type == "cuda"),
        ):
            loss, logged = self.method.total(batch)
        self.names = [*logged, "grad_norm"]
        return loss, torch.stack([v.float() for v in logged.values()])

    @contextmanager
    def _computing(self, longest: int) -> Iterator[None]:
        """Weights in the compute type, and the attention kernel that suits the length."""
        with ExitStack() as stack:
            for copy in self._copies:
                stack.enter_context(copy.swapped())
            for backbone in self._backbones:
                low_precision = any(copy.module is backbone for copy in self._copies)
                stack.enter_context(backbone.computing(low_precision_weights=low_precision, longest=longest))
            yield

    def _gradients(self, lengths: dict[str, int]) -> tuple[Tensor, Tensor]:
        """Forward and backward; gradients are where `_gradient` finds them afterwards."""
        add = self.accumulate > 1
        if not add:
            for p in self._direct:
                p.grad = None
        if self._update is None:
            self.refresh()
        with self._computing(self.method.longest(lengths)):
            loss, logged = self._loss(lengths)
            (loss / self.accumulate).backward()
        for copy in self._copies:
            copy.collect()
        if add or self._update is None:
            for copy in self._copies:
                copy.hand_over(add)
        return loss.detach(), logged

    def _gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Of a parameter, in fp32, or in the twin's type where the update reads it like that."""
        twin = self._twins.get(id(parameter))
        return parameter.grad if twin is None or twin.grad is None else twin.grad

    def _body(self, lengths: dict[str, int], updates: bool) -> None:
        assert self.rows is not None
        assert self.bad_rows is not None
        loss, logged = self._gradients(lengths)
        norm = torch.zeros_like(self.found_inf)
        if updates and self._update is not None:
            ready = self._update.take([self._gradient(p) for p in self._update.parameters])
            norm = self._update.norm(ready)
        elif updates:
            norm = total_norm([g for p in self.parameters if (g := self._gradient(p)) is not None])
        scale = self._finalize_step(
            loss, norm, logged, self.rows, self.bad_rows, self.found_inf, self.totals, self._clip, updates
        )
        self.optimizer.grad_scale = scale  # type: ignore[attr-defined]
        if updates:
            if self._update is None:
                torch.optim.AdamW.step(self.optimizer)
            else:
                self._update(ready, scale, self.found_inf)
                for copy in self._copies:
                    copy.clear()
            if self.accumulate > 1:
                torch._foreach_zero_([p.grad for p in self.parameters if p.grad is not None])

    def _capture(self, lengths: dict[str, int], updates: bool) -> torch.cuda.CUDAGraph:
        """Warm up without any effect on weights, gradients or random state, then record."""
        assert self.rows is not None
        assert self.bad_rows is not None
        random_state = torch.cuda.get_rng_state(self.device)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            with self._computing(self.method.longest(lengths)):
                for _ in range(_WARM_UPS):
                    loss, logged = self._loss(lengths)
                    inputs = [*self._direct, *(t for copy in self._copies for t in copy.leaves)]
                    torch.autograd.grad(loss, inputs, allow_unused=True)
            if len(self.totals) == 0:
                self.totals = torch.zeros(2, len(logged) + 1, device=self.device)
            # Compiled here, on copies: inside the capture it could not be.
            rows, bad_rows, found_inf, totals = (
                x.clone() for x in (self.rows, self.bad_rows, self.found_inf, self.totals)
            )
            norm = torch.ones_like(found_inf)
            self._finalize_step(
                loss.detach(), norm, logged, rows, bad_rows, found_inf, totals, self._clip, updates
            )
            del loss, logged
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.set_rng_state(random_state, self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, **self.capture_arguments):
            self._body(lengths, updates)
        torch.cuda.set_rng_state(random_state, self.device)
        return graph


def packs(method: Method, longest: int) -> bool:
    """Whether a captured step leaves padding out of rows of at most ``longest`` tokens, as scoring then does."""
    return method.runner.packing and all(b.unpads(longest) for b in backbones_of(method))


@torch.no_grad()
def finalize_step(
    loss: Tensor,
    norm: Tensor,
    logged: Tensor,
    rows: Tensor,
    bad_rows: Tensor,
    found_inf: Tensor,
    totals: Tensor,
    clip: float | None,
    updates: bool,
) -> Tensor:
    """What divides the gradients of this step, a scalar; keeps the accounts of the run.

    Args:
        loss, norm: scalars of the step.
        logged: [n], what is logged of it besides the norm.
        rows: its batch.
        bad_rows: becomes the first batch whose loss or norm is not finite.
        found_inf: becomes 1 at it, for good.
        totals: [2, n + 1], sums of what is logged and of the norm, and how many they are of.
        clip: largest norm. (The update divides the gradients as it reads them: clipping costs no pass of its own.)
        updates: whether there is a norm.
    """
    bad = ~(torch.isfinite(loss) & torch.isfinite(norm))
    bad_rows.copy_(torch.where(bad & (found_inf == 0), rows, bad_rows))
    found_inf.copy_(torch.maximum(found_inf, bad.to(found_inf.dtype)))
    n = len(logged) + int(updates)
    totals[0, :n] += torch.cat([logged, norm[None]])[:n]
    totals[1, :n] += 1
    return norm.new_ones(()) if clip is None else ((norm + _CLIP_EPS) / clip).clamp(min=1.0)


def joint_shapes(lengths: dict[str, int], budgets: dict[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Those of views that go through the model together, with few distinct widths and sums: each is a graph.

    Args:
        lengths: tokens of the longest row of each view.
        budgets: at least the true tokens of each view.

    Returns:
        The width of a row, equal for all views (padding costs next to nothing), and budgets that are no smaller.
    """
    total = sum(budgets.values())
    first = next(iter(budgets))
    width = row_capacity(max(lengths.values()))
    return dict.fromkeys(lengths, width), budgets | {first: budgets[first] + token_capacity(total) - total}


def _prepare(optimizer: torch.optim.AdamW, device: torch.device) -> Tensor:
    """State and learning rate as tensors on the device, so that a captured update reads their present values.

    Returns:
        Counts of updates [n] of the parameters in the order of the groups; each state's ``step`` is a view of it.
    """
    steps = torch.zeros(sum(len(group["params"]) for group in optimizer.param_groups), device=device)
    views = iter(steps.unbind(0))
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(float(group["lr"]), device=device)
        group["capturable"] = True
        for p in group["params"]:
            state, step = optimizer.state[p], next(views)
            if not state:
                state["exp_avg"] = torch.zeros_like(p)
                state["exp_avg_sq"] = torch.zeros_like(p)
            else:
                step.copy_(torch.as_tensor(state["step"], dtype=torch.float32))
            state["step"] = step
    return steps
