"""Schedules, and settings that are refused."""

from __future__ import annotations

import pytest
import torch

from embedlab.errors import UserError
from embedlab.training.optimizer import OptimizerConfig, ReplayableAdamW, build_optimizer, factor


def test_linear_falls_to_zero_after_the_warm_up() -> None:
    values = [factor(s, schedule="linear", warmup=2, total=6) for s in range(7)]
    assert values == [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]


def test_without_warm_up_the_first_step_has_the_whole_rate() -> None:
    assert factor(0, schedule="linear", warmup=0, total=10) == 1.0
    assert factor(0, schedule="constant", warmup=0, total=10) == 1.0
    assert factor(10**6, schedule="constant", warmup=0, total=10) == 1.0


def test_cosine_halves_in_the_middle() -> None:
    assert factor(5, schedule="cosine", warmup=0, total=10) == pytest.approx(0.5)


@pytest.mark.parametrize(
    "wrong", [{"lr": 0}, {"lr": -1e-5}, {"schedule": "step"}, {"clip": 0}, {"accumulate": 0}, {"warmup_steps": -1}]
)
def test_settings_out_of_range_name_their_key(wrong: dict) -> None:
    with pytest.raises(UserError, match=f"optimizer.{next(iter(wrong))}"):
        OptimizerConfig(**wrong)


def test_frozen_parameters_stay_out() -> None:
    free, frozen = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer, _ = build_optimizer(OptimizerConfig(), [free, frozen], 10, torch.device("cpu"))
    assert [p for g in optimizer.param_groups for p in g["params"]] == [free]


def test_a_replay_stands_for_the_step() -> None:
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = ReplayableAdamW([p], lr=0.1)
    calls = []
    optimizer.replay = lambda: calls.append("replayed")
    p.grad = torch.ones(2)
    optimizer.step(lambda: calls.append("closure"))
    assert calls == ["closure", "replayed"] and torch.equal(p.detach(), torch.ones(2))
    optimizer.replay = None
    optimizer.step()
    assert not torch.equal(p.detach(), torch.ones(2))
