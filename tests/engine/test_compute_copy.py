"""Forward and backward on a copy in another type, gradients and updates on the fp32 weights."""

from __future__ import annotations

import torch
from torch import nn

from embedlab.engine.precision import ComputeCopy, copyable


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.table.weight
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(4, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.frozen(self.table(ids))))


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.tensor([[1, 2, 3, 6]])).float().square().mean()


def test_a_copy_in_the_same_type_gives_the_same_loss_and_gradients() -> None:
    torch.manual_seed(0)
    model = Tied()
    loss_of(model).backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    copy = ComputeCopy(model, torch.float32)
    copy.refresh()
    with copy.swapped():
        loss_of(model).backward()
    assert all(p.grad is None for p in model.parameters())
    copy.hand_over(add=False)
    for name, parameter in model.named_parameters():
        if name in expected:
            torch.testing.assert_close(parameter.grad, expected[name])
        else:
            assert parameter.grad is None


def test_the_weights_come_back_and_stay_fp32() -> None:
    model = Tied()
    before = dict(model.named_parameters())
    copy = ComputeCopy(model, torch.bfloat16)
    with copy.swapped():
        assert model.table.weight.dtype == torch.bfloat16
        assert model.out.weight is model.table.weight
        assert model(torch.tensor([[1, 2]])).dtype == torch.bfloat16
    assert all(dict(model.named_parameters())[n] is p for n, p in before.items())


def test_refresh_sees_an_update() -> None:
    model = Tied()
    copy = ComputeCopy(model, torch.bfloat16)
    with torch.no_grad():
        model.norm.weight.fill_(3.0)
    copy.refresh()
    with copy.swapped():
        assert (model.norm.weight == 3.0).all()


def test_adding_accumulates_over_batches() -> None:
    model = Tied()
    copy = ComputeCopy(model, torch.float32)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(2):
        with copy.swapped():
            (loss_of(model) / 2).backward()
        copy.hand_over(add=True)
    got = model.norm.weight.grad.clone()
    model.zero_grad()
    loss_of(model).backward()
    torch.testing.assert_close(got, model.norm.weight.grad)


def test_half_precision_and_quantised_weights_are_left_alone() -> None:
    assert copyable(Tied())
    assert not copyable(Tied().half())
    quantised = Tied()
    quantised.frozen.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.uint8), requires_grad=False)
    assert not copyable(quantised)
