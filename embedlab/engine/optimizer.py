"""AdamW and its learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from embedlab.config.optimizer import OptimizerConfig, Schedule


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
        is the fused one's, and a CPU refuses one that a graph can hold."""
        groups = [
            {**saved, "fused": group["fused"], "capturable": group["capturable"]}
            for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=False)
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


def parameter_groups(module: nn.Module, lr: float, decay_vectors: bool = True) -> list[dict[str, Any]]:
    """The trained parameters in groups of one learning rate and decay, that of most first.

    A part of the model may have a rate of its own by an attribute ``lr_multiplier``, which holds for all its
    parameters (an outer part's, where both have one).

    Args:
        module: what is trained.
        lr: learning rate where no part says otherwise.
        decay_vectors: whether weight decay also acts on parameters of one dimension: norms and biases. On numbers by
            themselves (a learned temperature) it never acts.
    """
    multipliers: dict[nn.Parameter, float] = {}
    for part in module.modules():
        multiplier = getattr(part, "lr_multiplier", 1.0)
        if multiplier != 1.0:
            for p in part.parameters():
                multipliers.setdefault(p, float(multiplier))
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {(1.0, True): []}
    for p in module.parameters():
        if p.requires_grad:
            decayed = p.dim() > (0 if decay_vectors else 1)
            groups.setdefault((multipliers.get(p, 1.0), decayed), []).append(p)
    return [
        {"params": members, "lr": lr * multiplier, **({} if decayed else {"weight_decay": 0.0})}
        for (multiplier, decayed), members in groups.items()
        if members
    ]


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
