"""The work of a whole training step, in the order in which a graph holds it: gathering of tokens, forward, losses,
backward, the sum over devices, clipping, update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from embedlab.distributed.gather import rows_per_rank, weighted, world_size
from embedlab.engine.fused_adamw import FusedUpdate, total_norm, usable
from embedlab.engine.gradient_sum import GradientSum
from embedlab.engine.module import Method
from embedlab.engine.optimizer import ReplayableAdamW
from embedlab.engine.precision import ComputeCopy, copyable
from embedlab.engine.step import backbones_of, non_finite
from embedlab.kernels.decoder.decoder_build import known
from embedlab.kernels.decoder.fused_decoder import DecoderWeights
from embedlab.kernels.packing import row_capacity, token_capacity
from embedlab.objectives.precision import compiled_objectives

_CLIP_EPS = 1e-6  # as in torch.nn.utils.clip_grads_with_norm_


@dataclass(frozen=True)
class Shapes:
    """Of one batch, equal on all devices: what they follow from is the batch of all of them.

    Args:
        rows: of this device.
        lengths: tokens of the longest row of each view.
        token_budgets: at least the true tokens of each view that goes through the model without padding, all of them in
            one pass; None: padding is computed.
        rows_per_rank: where the devices have not equally many.
        updates: whether the batch ends in an update, and is not only added up.
    """

    rows: int
    lengths: dict[str, int]
    token_budgets: dict[str, int] | None
    rows_per_rank: tuple[int, ...] | None
    updates: bool

    @property
    def packed_tokens(self) -> int | None:
        """Tokens that one pass over the batch computes, where padding is left out."""
        return None if self.token_budgets is None else sum(self.token_budgets.values())

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for batches that one graph can compute."""
        # Of token budgets only the sum: methods that leave out padding have all views in one pass.
        lengths = tuple(sorted(self.lengths.items()))
        return self.rows, lengths, self.packed_tokens, self.rows_per_rank, self.updates


class WholeStep:
    """Computes the step of ``method``; one instance a fit.

    A loss or gradient that is not finite makes the update skip itself from then on (the flag that loss scaling uses),
    on all devices, so the weights stay those before it until the host sees the flag and stops the run.
    """

    def __init__(self, method: Method, optimizer: ReplayableAdamW) -> None:
        self.method = method
        self.optimizer = optimizer
        self.device = method.device
        self.accumulate = method.optimizer_config.accumulate
        self.parameters = method.trained()
        self.names: list[str] = []
        self.totals = torch.zeros(0)
        self.found_inf = torch.zeros((), dtype=torch.float32, device=self.device)
        self.shapes: Shapes | None = None
        self._rows: dict[int, tuple[Tensor, Tensor]] = {}
        """By the size of a batch: the numbers of its rows, and those of the first whose step was not finite."""
        self._packs = cache(partial(packs, method))
        self._dtype = {"bf16-mixed": torch.bfloat16}.get(str(method.trainer.precision))
        self._backbones = backbones_of(method)
        self._copies = [ComputeCopy(b, self._dtype) for b in self._backbones if self._copied(b)]  # type: ignore[arg-type]
        self._decoders = {id(b): DecoderWeights(b) for b in self._backbones if b.adapter is not None}
        self._twins = {
            id(p): t for copy in self._copies for p, t in zip(copy.masters, copy.twins, strict=True)
        }
        self._direct = [p for p in self.parameters if id(p) not in self._twins]
        steps = _prepare(optimizer, self.device)
        written_out = bool(self._copies) or any(known(b) for b in self._backbones)
        fused = written_out and usable(self.parameters)
        self._sum = self._gradient_sum(fused)
        self._update: FusedUpdate | None = None
        if fused:
            fp32 = self.accumulate > 1 or (self._sum is not None and self._sum.fp32)
            self._update = FusedUpdate(
                optimizer, steps, lambda p: self._twins.get(id(p)), fp32_gradients=fp32
            )
        self._clip = method.optimizer_config.clip
        self._finalize_step = finalize_step
        optimizer.found_inf = self.found_inf  # type: ignore[attr-defined]
        optimizer.replay = self.replay
        if self.accumulate > 1:
            for p in self.parameters:
                p.grad = torch.zeros_like(p) if self._sum is None else self._sum.slot(p)

    def _copied(self, backbone: Any) -> bool:
        """Whether a backbone computes with copies of its weights in the compute type.

        Not a frozen one, which may be a moving average whose copy would stay behind. And not one with an adapter: its
        residual stream would be bf16, which rounds the share of an adapter that has only begun to learn.
        """
        trained = any(p.requires_grad for p in backbone.parameters())
        return self._dtype is not None and trained and backbone.adapter is None and copyable(backbone)

    def _gradient_sum(self, fused: bool) -> GradientSum | None:
        """The sum of gradients over the devices; None: there is one device.

        torch's update, which is not `fused`, reads gradients in the weights' type.
        """
        if world_size() == 1:
            return None
        fp32 = self.accumulate > 1 or not fused or self.method.optimizer_config.reduce_dtype == "fp32"
        found = GradientSum(self.parameters, {} if fp32 else self._twins, fp32, self.device)
        # In several passes, a gradient comes in several parts.
        if self.accumulate == 1 and self.method.optimizer_config.chunk is None:
            for p in self._direct:
                found.watch(p, [p])
            for copy in self._copies:
                for leaf, masters in copy.gradients():
                    found.watch(leaf, masters)
        return found

    def load(self, batch: dict[str, Any]) -> bool:
        """Bring a batch's row numbers to the device; True when its replay ends in an update."""
        rows: Tensor = batch["rows"]
        if len(rows) not in self._rows:
            self._rows[len(rows)] = self._row_buffers(rows)
        self._rows[len(rows)][0].copy_(rows, non_blocking=True)
        lengths, budgets = batch["lengths"], None
        if self._packs(self.method.longest(lengths)):
            # Of views in one pass alone: a graph is known by their sum.
            told = {v: n for v, n in batch["token_budgets"].items() if not self.method.pads(v)}
            lengths, budgets = joint_shapes(lengths, told)
        updates = not self.method.runner.accumulating(self.method)
        self.shapes = Shapes(len(rows), lengths, budgets, batch.get("rows_per_rank"), updates)
        return updates

    def _row_buffers(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        empty = torch.full_like(rows, -1, device=self.device)
        return empty.clone(), empty

    def replay(self) -> None:
        """Compute the step of the batch that was loaded."""
        assert self.shapes is not None
        self._before()
        self._body(self.shapes)

    def _before(self) -> None:
        # A checkpoint or the best weights may have been loaded meanwhile.
        if self._update is not None:
            self._update.fill()
            self.refresh()
        else:  # the others are a part of the step
            self._refresh_frozen()

    def refresh(self) -> None:
        """What the forward pass computes with is the present weights."""
        self._refresh_frozen()
        self._refresh_copies()

    def _refresh_frozen(self) -> None:
        for decoder in self._decoders.values():
            decoder.refresh_if_written()

    def _refresh_copies(self) -> None:
        for copy in self._copies:
            if self._update is None:
                copy.refresh()
            else:  # the update writes it
                copy.refresh_if_written()

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """The encoder computes as in a step; `refresh` first."""
        with self._computing(), self._autocast():
            yield

    def check(self) -> None:
        """Raise ``NonFiniteLoss`` if any step since the start was not finite (waits for the device)."""
        if self.found_inf.item():
            rows = [row for _, bad in self._rows.values() for row in bad.tolist() if row >= 0]
            raise non_finite(self.method, rows)

    def close(self) -> None:
        """Let go of what must not outlive the fit, or the processes' connection."""
        if self._sum is not None:
            self._sum.close()

    def _coming(self, shapes: Shapes) -> AbstractContextManager[None]:
        """Around a backward pass: gradients are sent as they come."""
        return self._sum.coming(shapes.key) if self._sum is not None and shapes.updates else nullcontext()

    def _autocast(self) -> torch.autocast:
        # Autocast's cache of cast weights would tie one graph to the memory of another.
        device = self.device.type
        return torch.autocast(device, self._dtype, enabled=self._dtype is not None, cache_enabled=False)

    def _loss(self, shapes: Shapes) -> tuple[Tensor, Tensor]:
        resident: Any = self.method.trainer.datamodule.resident(self.device)  # type: ignore[attr-defined]
        batch = resident.gather(self._rows[shapes.rows][0], shapes.lengths, shapes.token_budgets)
        with (
            self._autocast(),
            compiled_objectives(self.device.type == "cuda"),
            rows_per_rank(shapes.rows_per_rank),
        ):
            loss, logged = self.method.total(batch)
        self.names = [*logged, "grad_norm"]
        if shapes.rows_per_rank is not None:
            loss, logged = weighted(loss, logged, shapes.rows_per_rank)
        return loss, torch.stack([v.float() for v in logged.values()])

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Weights in the compute type, and LoRA layers of one input as one."""
        with ExitStack() as stack:
            for copy in self._copies:
                stack.enter_context(copy.swapped())
            for backbone in self._backbones:
                low_precision = any(copy.module is backbone for copy in self._copies)
                stack.enter_context(backbone.computing(low_precision, self._decoders.get(id(backbone))))
            yield

    def _gradients(self, shapes: Shapes) -> tuple[Tensor, Tensor]:
        """Forward and backward; gradients are where `_gradient` finds them afterwards."""
        add = self.accumulate > 1
        if not add:  # those of the step before may be where the sums will be
            for p in self.parameters:
                p.grad = None
        if self._update is None:
            self._refresh_copies()
        with self._computing():
            loss, logged = self._loss(shapes)
            with self._coming(shapes):
                (loss / (self.accumulate * world_size())).backward()
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

    def _body(self, shapes: Shapes) -> None:
        loss, logged = self._gradients(shapes)
        norm = torch.zeros_like(self.found_inf)
        mean = loss
        if shapes.updates:
            grads = {id(p): g for p in self.parameters if (g := self._gradient(p)) is not None}
            if self._sum is not None:
                grads, mean, failed = self._sum(grads, loss, self.found_inf)
                self.found_inf.copy_(failed)
            if self._update is not None:
                ready = self._update.take([grads.get(id(p)) for p in self._update.parameters])
                norm = self._update.norm(ready)
            else:
                norm = total_norm(list(grads.values()))
        rows, bad_rows = self._rows[shapes.rows]
        if len(self.totals) == 0:
            self.totals = torch.zeros(2, len(logged) + 1, device=self.device)
        scale = self._finalize_step(
            loss, mean, norm, logged, rows, bad_rows, self.found_inf, self.totals, self._clip, shapes.updates
        )
        self.optimizer.grad_scale = scale  # type: ignore[attr-defined]
        if not shapes.updates:
            return
        if self._update is None:
            for p in self.parameters:
                p.grad = grads.get(id(p))
            torch.optim.AdamW.step(self.optimizer)
        else:
            self._update(ready, scale, self.found_inf)
            for copy in self._copies:
                copy.clear()
        if self.accumulate > 1:
            torch._foreach_zero_([p.grad for p in self.parameters if p.grad is not None])


def packs(method: Method, longest: int) -> bool:
    """Whether a captured step leaves padding out of rows of at most ``longest`` tokens, as scoring then does."""
    return method.runner.packing and all(b.unpads(longest) for b in backbones_of(method))


@torch.no_grad()
def finalize_step(
    loss: Tensor,
    mean: Tensor,
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
        mean: of the devices' losses, where the batch ends in an update; the loss itself with one device.
        logged: [n], what is logged of it besides the norm.
        rows, bad_rows: [B], of the batch, and of the first one whose loss on this device (or else whose gradient) was
            not finite, -1 before.
        found_inf: scalar, 1 from the first step on whose loss or gradient is not finite: the update skips itself.
        totals: [2, n + 1], sums and counts of all that is logged.
        clip: largest norm; None: none. (The update multiplies the gradients by 1 / the result as it reads them:
            clipping costs no pass of its own.)
        updates: whether there is a norm.
    """
    bad = ~(torch.isfinite(mean) & torch.isfinite(norm))
    here = bad & (~torch.isfinite(loss) | torch.isfinite(mean))
    bad_rows.copy_(torch.where(here & (found_inf == 0), rows, bad_rows))
    found_inf.copy_(torch.maximum(found_inf, bad.to(found_inf.dtype)))
    n = len(logged) + int(updates)
    totals[0, :n] += torch.cat([logged, norm[None]])[:n]
    totals[1, :n] += 1
    return norm.new_ones(()) if clip is None else ((norm + _CLIP_EPS) / clip).clamp(min=1.0)


def joint_shapes(lengths: dict[str, int], budgets: dict[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Those of views that go through the model together, with few distinct widths and sums: each is a graph.

    Args:
        lengths: tokens of the longest row of each view.
        budgets: at least the true tokens of each view of that pass.

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
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    steps = torch.zeros(count, dtype=torch.float32, device=device)
    views = iter(steps.unbind(0))
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float32, device=device)
        group["capturable"] = device.type == "cuda"
        group["fused"] = True  # alone heeds the flag and the scale
        for p in group["params"]:
            state, step = optimizer.state[p], next(views)
            if not state:
                state["exp_avg"] = torch.zeros_like(p)
                state["exp_avg_sq"] = torch.zeros_like(p)
            else:
                step.copy_(torch.as_tensor(state["step"], dtype=torch.float32))
            state["step"] = step
    return steps
