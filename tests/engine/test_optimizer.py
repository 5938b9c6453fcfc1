"""Schedules, and settings that are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from embedlab.config.optimizer import OptimizerConfig
from embedlab.engine.module import Method
from embedlab.engine.optimizer import ReplayableAdamW, build_optimizer, factor, parameter_groups
from embedlab.errors import UserError
from embedlab.methods import method_class


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
    "wrong",
    [{"lr": 0}, {"lr": -1e-5}, {"schedule": "step"}, {"clip": 0}, {"accumulate": 0}, {"warmup_steps": -1}],
)
def test_settings_out_of_range_name_their_key(wrong: dict) -> None:
    with pytest.raises(UserError, match=f"optimizer.{next(iter(wrong))}"):
        OptimizerConfig(**wrong)


def test_frozen_parameters_stay_out() -> None:
    free, frozen = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer, _ = build_optimizer(OptimizerConfig(), [free, frozen], 10, torch.device("cpu"))
    assert [p for g in optimizer.param_groups for p in g["params"]] == [free]


def model_with_a_faster_part() -> tuple[torch.nn.Module, torch.nn.Linear, torch.nn.Linear]:
    slow, fast = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    fast.lr_multiplier = 10.0
    fast.bias.requires_grad_(False)
    return torch.nn.Sequential(slow, fast), slow, fast


def test_a_part_with_a_multiplier_is_a_group_of_its_own() -> None:
    model, slow, fast = model_with_a_faster_part()
    groups = parameter_groups(model, 0.1)
    assert [g["lr"] for g in groups] == [0.1, pytest.approx(1.0)]
    assert groups[0]["params"] == [slow.weight, slow.bias]
    assert groups[1]["params"] == [fast.weight]


def test_without_multipliers_there_is_one_group_in_the_order_of_the_parameters() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    (group,) = parameter_groups(model, 0.1)
    assert all(a is b for a, b in zip(group["params"], model.parameters(), strict=True))


def test_norms_and_biases_may_go_without_decay() -> None:
    """One update at gradient 0: what is decayed shrinks by lr x decay, what is not stays to the last bit."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm1d(4), nn.Linear(4, 2)
    )
    model[4].lr_multiplier = 10.0
    for p in model.parameters():
        nn.init.normal_(p)
        p.grad = torch.zeros_like(p)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    groups = parameter_groups(model, 0.1, decay_vectors=False)
    assert [(g["lr"], g.get("weight_decay")) for g in groups] == [
        (0.1, None),
        (0.1, 0.0),
        (1.0, None),
        (1.0, 0.0),
    ]
    optimizer, _ = build_optimizer(OptimizerConfig(weight_decay=0.5), groups, 10, torch.device("cpu"))
    optimizer.step()
    matrices = {"0.weight": 0.95, "1.weight": 0.95, "4.weight": 0.5}
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), matrices.get(name, 1.0) * before[name])


class Layer(nn.Linear):
    """In an encoder's place."""

    towers = ()


class TenSteps(Method):
    """What every method has of the base, around any module."""

    def schedule_steps(self) -> int:
        return 10


RELEASES = {
    "masked_lm": False,
    "causal_lm": False,
    "bepa": True,
    "jtcse": True,
    "tncse": True,
    "distil": True,
}


@pytest.mark.parametrize("given", [None, True, False])
@pytest.mark.parametrize("method", RELEASES)
def test_the_releases_decide_what_is_decayed(method: str, given: bool | None) -> None:
    decays = RELEASES[method] if given is None else given
    config = method_class(method).config_class(name=method)
    for decay in (0.01, 0.0):
        settings = OptimizerConfig(weight_decay=decay, decay_norms_and_biases=given)
        groups = TenSteps(Layer(3, 3), config, settings).configure_optimizers()["optimizer"].param_groups
        assert [g["weight_decay"] for g in groups] == ([decay] if decays or not decay else [decay, 0.0])


@pytest.mark.parametrize("as_tensor", [False, True])
def test_the_schedule_keeps_the_ratio_of_the_rates(as_tensor: bool) -> None:
    """Rates are tensors in a captured step, one for each group, and the schedule writes into them."""
    model, _, _ = model_with_a_faster_part()
    config = OptimizerConfig(lr=0.1)
    optimizer, scheduler = build_optimizer(config, parameter_groups(model, config.lr), 4, torch.device("cpu"))
    if as_tensor:
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(float(group["lr"]))
    rates = [group["lr"] for group in optimizer.param_groups]
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler.step()
    now = [group["lr"] for group in optimizer.param_groups]
    assert [float(r) for r in now] == [pytest.approx(0.075), pytest.approx(0.75)]
    if as_tensor:
        assert all(a is b for a, b in zip(rates, now, strict=True))


def test_a_replay_stands_for_the_step() -> None:
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = ReplayableAdamW([p], lr=0.1)
    calls = []
    optimizer.replay = lambda: calls.append("replayed")
    p.grad = torch.ones(2)
    optimizer.step(lambda: calls.append("closure"))
    assert calls == ["closure", "replayed"]
    assert torch.equal(p.detach(), torch.ones(2))
    optimizer.replay = None
    optimizer.step()
    assert not torch.equal(p.detach(), torch.ones(2))


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_a_checkpoint_of_another_device_leaves_the_kernel(fused: bool, captured: bool) -> None:
    """On CUDA it is the fused one, by which captured steps clip; a captured step's cannot run on the CPU."""
    parameters = [nn.Parameter(torch.randn(n)) for n in (3, 4)]
    there, here = (ReplayableAdamW(parameters, lr=1e-3, fused=f) for f in (not fused, fused))
    for p in parameters:
        p.grad = torch.ones_like(p)
    there.step()
    if captured:
        for group in there.param_groups:
            group["lr"], group["capturable"] = torch.tensor(group["lr"]), True
    here.load_state_dict(there.state_dict())
    assert [(g["fused"], g["capturable"]) for g in here.param_groups] == [(fused, False)]
    here.step()
    assert all(float(s["step"]) == 2 for s in here.state_dict()["state"].values())
