"""Run by `test_fused_update.py` in a process of its own: the kernel under Triton's interpreter against torch."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor, nn

from embedlab.engine.fused_adamw import FusedUpdate
from embedlab.engine.optimizer import ReplayableAdamW
from embedlab.engine.whole_step import _prepare

SIZES = [(1,), (7,), (1023,), (1025,), (2048,), (64, 96), (4099,)]
RATES = (1e-3, 5e-3)


def weights(sizes: list[tuple[int, ...]], device: str) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(s).to(device)) for s in sizes]


def optimizer(parameters: list[nn.Parameter], decay: float, cls: Any) -> torch.optim.AdamW:
    half = len(parameters) // 2
    groups = [
        {"params": parameters[:half], "lr": RATES[0]},
        {"params": parameters[half:], "lr": RATES[1], "betas": (0.8, 0.99)},
    ]
    return cls([g for g in groups if g["params"]], weight_decay=decay)


def worst(found: list[Tensor], wanted: list[Tensor]) -> float:
    """Largest difference, relative to each tensor's root mean square."""
    return max(
        float((a.float() - b.float()).abs().max() / b.float().square().mean().sqrt().clamp(min=1e-30))
        for a, b in zip(found, wanted, strict=True)
    )


def compare(
    sizes: list[tuple[int, ...]],
    grad: torch.dtype,
    decay: float,
    scale: float = 1.0,
    steps: int = 5,
    device: str = "cpu",
) -> dict[str, float]:
    """`steps` updates here and by torch; one tensor has no gradient at the second, and the third is not finite."""
    ours, theirs = weights(sizes, device), weights(sizes, device)
    fused, plain = optimizer(ours, decay, ReplayableAdamW), optimizer(theirs, decay, torch.optim.AdamW)
    counts = _prepare(fused, torch.device(device))
    twins = {id(p): p.detach().to(torch.bfloat16) for p in ours[:-1]}  # the last is a head in fp32
    update = FusedUpdate(fused, counts, lambda p: twins.get(id(p)), fp32_gradients=grad == torch.float32)
    norms: list[float] = []
    for step in range(steps):
        for group, other in zip(fused.param_groups, plain.param_groups, strict=True):
            other["lr"] *= 0.9
            group["lr"].mul_(0.9)
        torch.manual_seed(step)
        grads: list[Tensor | None] = [
            torch.randn_like(p).to(grad if id(p) in twins else torch.float32) for p in ours
        ]
        if step == 1:
            grads[0] = None
        bad = step == 2
        ready = update.take(grads)
        wanted = sum(float(g.double().square().sum()) for g in grads if g is not None) ** 0.5
        norms.append(abs(float(update.norm(ready)) / wanted - 1))
        update(ready, *(torch.tensor(float(x), device=device) for x in (scale, bad)))
        if bad:
            continue
        for p, g in zip(theirs, grads, strict=True):
            p.grad = None if g is None else g.float() / scale
        plain.step()
    first, second = ([o.state[p] for p in ps] for o, ps in ((fused, ours), (plain, theirs)))
    return {
        "norm": max(norms),
        "weights": worst([p.detach() for p in ours], [p.detach() for p in theirs]),
        "exp_avg": worst([s["exp_avg"] for s in first], [s["exp_avg"] for s in second]),
        "exp_avg_sq": worst([s["exp_avg_sq"] for s in first], [s["exp_avg_sq"] for s in second]),
        "steps": worst([s["step"] for s in first], [s["step"] for s in second]),
        "twins": max(
            float(((twins[id(p)].float() - p.detach()) / p.detach()).abs().max())
            for p in ours
            if id(p) in twins
        ),
    }


def main() -> None:
    found = {
        "fp32": compare(SIZES, torch.float32, 0.0),
        "bf16": compare(SIZES, torch.bfloat16, 0.0),
        "decay": compare(SIZES, torch.bfloat16, 0.1),
        "clipped": compare(SIZES, torch.bfloat16, 0.01, scale=3.7),
        "large": compare([(768, 3072), (5,)], torch.bfloat16, 0.01, steps=2),
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
