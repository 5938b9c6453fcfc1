"""Heads of training: the projector's statistics are of all rows at hand, and it keeps none."""

from __future__ import annotations

import torch

from embedlab.config.optimizer import OptimizerConfig
from embedlab.methods.heads import bn2_head, new_head
from embedlab.methods.simcse import SimCSE, SimCSEConfig
from tests.methods.baselines import Tiny, batch, encoder


def test_the_projector_is_two_normalised_layers() -> None:
    head, x = bn2_head(6), torch.randn(10, 6, generator=torch.Generator().manual_seed(0))
    assert [tuple(p.shape) for p in head.parameters()] == [(12, 6), (12,), (12,), (6, 12)]
    assert not head.state_dict().keys() - dict(head.named_parameters()).keys()

    def normalised(y: torch.Tensor) -> torch.Tensor:
        return (y - y.mean(0)) / (y.var(0, correction=0) + 1e-5).sqrt()

    inner = normalised(x @ head[0].weight.T).relu()
    torch.testing.assert_close(head(x), normalised(inner @ head[3].weight.T), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(head.eval()(x), head.train()(x))


def test_both_views_of_simcse_are_normalised_together(tiny: Tiny) -> None:
    method = SimCSE(encoder(tiny), SimCSEConfig(mlp="bn2"), OptimizerConfig()).eval()
    seen: list[int] = []
    method.head.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    method.losses(batch(method))
    assert seen == [12]
    assert isinstance(new_head("none", 4), torch.nn.Identity)
