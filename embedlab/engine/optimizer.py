"""AdamW and its learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from embedlab.errors import UserError

Schedule = Literal["linear", "constant", "cosine"]


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with clipping; the defaults are those of Hugging Face's trainer, which SimCSE's recipe relies on."""

    lr: float = 3e-5
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    schedule: Schedule = "linear"
    """Of the learning rate after the warm-up: ``linear`` and ``cosine`` fall to 0 at the last step."""
    warmup_steps: int = 0
    clip: float | None = 1.0
    """Largest norm of the whole gradient; None does not clip."""
    accumulate: int = 1
    """Batches added up before an update. This adds no in-batch negatives."""
    chunk: int | None = None
    """Rows that are encoded at once: a contrastive batch of any size in the memory of one chunk, with the
    gradients of the whole (GradCache), for one more forward pass. None: all at once."""

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise UserError("the learning rate must be positive", key="optimizer.lr", value=self.lr)
        betas = tuple(self.betas)
        if len(betas) != 2 or not all(0 <= b < 1 for b in betas):
            raise UserError(
                "must be two numbers from 0 up to 1",
                key="optimizer.betas",
                value=list(betas),
                fix="[0.9,0.999]",
            )
        if not 0 < self.eps < math.inf:
            raise UserError("must be positive", key="optimizer.eps", value=self.eps, fix="1e-8")
        if not 0 <= self.weight_decay < math.inf:
            raise UserError("must not be negative", key="optimizer.weight_decay", value=self.weight_decay)
        if self.schedule not in ("linear", "constant", "cosine"):
            raise UserError(
                "unknown schedule",
                key="optimizer.schedule",
                value=self.schedule,
                fix="linear, constant or cosine",
            )
        if self.warmup_steps < 0:
            raise UserError("must not be negative", key="optimizer.warmup_steps", value=self.warmup_steps)
        if self.clip is not None and not self.clip > 0:
            raise UserError(
                "the clipping norm must be positive",
                key="optimizer.clip",
                value=self.clip,
                fix="null for none",
            )
        if self.accumulate < 1:
            raise UserError("must be at least 1", key="optimizer.accumulate", value=self.accumulate)
        if self.chunk is not None and self.chunk < 1:
            raise UserError("must be at least 1, or null", key="optimizer.chunk", value=self.chunk)
        object.__setattr__(self, "betas", (float(self.betas[0]), float(self.betas[1])))


class ReplayableAdamW(torch.optim.AdamW):
    """AdamW whose step may be part of a captured CUDA graph.

    While ``replay`` is set, ``step`` runs it instead: the graph holds the update, and callers that count steps
    (Lightning's progress, schedulers) go on seeing an ordinary optimiser.
    """

    replay: Callable[[], None] | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        if self.replay is None:
            return super().step(closure)
        if closure is not None:
            closure()
        self.replay()
        return None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """The kernel stays that of this device, whatever the device of the checkpoint had: clipping in a captured step
        is the fused one's."""
        groups = [
            {**saved, "fused": own["fused"]}
            for saved, own in zip(state_dict["param_groups"], self.param_groups, strict=False)
        ]
        if len(groups) == len(state_dict["param_groups"]):
            state_dict = {**state_dict, "param_groups": groups}
        super().load_state_dict(state_dict)


def factor(step: int, *, schedule: Schedule, warmup: int, total: int) -> float:
    """Multiplier of the learning rate before update ``step`` (0 is the first)."""
    if step < warmup:
        return (step + 1) / (warmup + 1) if schedule == "constant" else step / warmup
    if schedule == "constant":
        return 1.0
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    return 1.0 - done if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))


def parameter_groups(module: nn.Module, lr: float) -> list[dict[str, Any]]:
    """The trained parameters in groups of one learning rate, that of most first.

    A part of the model may have a rate of its own by an attribute ``lr_multiplier``, which holds for all its
    parameters (an outer part's, where both have one).
    """
    multipliers: dict[nn.Parameter, float] = {}
    for part in module.modules():
        multiplier = getattr(part, "lr_multiplier", 1.0)
        if multiplier != 1.0:
            for p in part.parameters():
                multipliers.setdefault(p, float(multiplier))
    groups: dict[float, list[nn.Parameter]] = {1.0: []}
    for p in module.parameters():
        if p.requires_grad:
            groups.setdefault(multipliers.get(p, 1.0), []).append(p)
    return [{"params": members, "lr": lr * multiplier} for multiplier, members in groups.items() if members]


def build_optimizer(
    config: OptimizerConfig,
    parameters: Iterable[nn.Parameter] | list[dict[str, Any]],
    total_steps: int,
    device: torch.device,
) -> tuple[ReplayableAdamW, LambdaLR]:
    """The optimiser over the parameters that need gradients, and its schedule over ``total_steps`` updates.

    ``parameters`` may also be groups with a rate each, as ``parameter_groups`` gives; the schedule scales all.
    The fused kernel is used on CUDA. Lightning refuses it with its own clipping under mixed precision, so the
    methods here clip by themselves.
    """
    trained: list[Any] = [p for p in parameters if isinstance(p, dict) or p.requires_grad]
    optimizer = ReplayableAdamW(
        trained,
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=device.type == "cuda",
    )
    schedule = partial(factor, schedule=config.schedule, warmup=config.warmup_steps, total=total_steps)
    return optimizer, LambdaLR(optimizer, schedule)
