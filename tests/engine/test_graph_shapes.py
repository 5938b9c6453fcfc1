"""How many graphs a captured step needs, and what they go on reading; without a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from embedlab.engine.cuda_graph import StepGraphs
from embedlab.engine.fused_adamw import _Addresses
from embedlab.engine.whole_step import joint_shapes
from embedlab.kernels.packing import token_capacity


def test_one_view_keeps_its_capacity() -> None:
    for tokens in range(1, 20_000, 7):
        capacity = token_capacity(tokens)
        assert joint_shapes({"a": 30}, {"a": capacity}) == ({"a": 32}, {"a": capacity})


def test_three_views_need_few_graphs() -> None:
    """Batches of premises, hypotheses and contradictions."""
    draw = torch.Generator().manual_seed(0)
    seen, alone = set(), set()
    for _ in range(300):
        rows = {
            name: (torch.empty(512).log_normal_(mean, 0.45, generator=draw) + 3).clamp(max=100).int()
            for name, mean in (("anchor", 2.7), ("positive", 2.1), ("negative", 2.2))
        }
        tokens = {name: int(n.sum()) for name, n in rows.items()}
        capacities = {name: token_capacity(n) for name, n in tokens.items()}
        longest = {name: int(n.max()) for name, n in rows.items()}
        lengths, joint = joint_shapes(longest, capacities)
        assert all(joint[n] >= tokens[n] and lengths[n] >= longest[n] for n in tokens)
        assert sum(joint.values()) <= 1.08 * sum(tokens.values())
        assert len(set(lengths.values())) == 1
        seen.add((tuple(lengths.values()), sum(joint.values())))
        alone.add(tuple(capacities.values()))
    assert len(alone) > 20
    assert len(seen) <= 8


def test_a_graphs_addresses_stay_its_own() -> None:
    """However many graphs there are: each reads its row at every replay."""
    addresses = _Addresses(999, torch.device("cpu"))
    places = []
    for i in range(1500):
        places.append(addresses._reserve([i + 1] * 999).data_ptr())
        addresses.fill()
    assert len(set(places)) == len(places)
    found = [block[:, 0].tolist() for block in addresses._blocks]
    assert {x for row in found for x in row} == set(range(1501))


def test_a_warm_up_leaves_gradients_and_buffers_as_they_were() -> None:
    """A queue that a step pushes into has no rows of steps that only warmed up."""
    method = torch.nn.BatchNorm1d(3)
    weight: Any = method.weight
    weight.grad = torch.ones(3)
    work: Any = SimpleNamespace(method=method, _direct=[weight], _copies=[])
    before = {name: buffer.clone() for name, buffer in method.named_buffers()}
    kept = {name: buffer.data_ptr() for name, buffer in method.named_buffers()}
    with StepGraphs._left_as_it_was(work):
        method(torch.randn(8, 3)).square().sum().backward()
        assert method.num_batches_tracked == 1
        assert not torch.equal(weight.grad, torch.ones(3))
    for name, buffer in method.named_buffers():
        assert torch.equal(buffer, before[name])
        assert buffer.data_ptr() == kept[name], "a graph reads it there"
    assert torch.equal(weight.grad, torch.ones(3))
