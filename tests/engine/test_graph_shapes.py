"""How many graphs a captured step needs, and what they go on reading; without a device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from embedlab.config.run import RunConfig
from embedlab.engine.cuda_graph import StepGraphs
from embedlab.engine.fused_adamw import _Addresses
from embedlab.engine.whole_step import WholeStep, joint_shapes
from embedlab.kernels.packing import token_capacity
from embedlab.run.run import build


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


@pytest.mark.parametrize("teachers", ["roberta", "roberta roberta", "bert roberta"])
def test_a_graph_has_room_for_every_batch_that_it_computes(
    compose_run: Callable[..., RunConfig], tiny: Callable[..., Path], tmp_path: Path, teachers: str
) -> None:
    """Also beside teachers that read text otherwise, whose own tokens the student's pass has not."""
    named = zip(("teacher", "teacher2"), teachers.split(), strict=False)
    more = [f"method.{key}={tiny(kind, seed=1)}" for key, kind in named]
    config = compose_run("method=rankcse", "method.teacher_pooling=mean", *more)
    method, _ = build(config, tmp_path)
    method.runner = SimpleNamespace(accumulating=lambda method: False)  # type: ignore[assignment]
    names = method.views({"sentence": ("sentence", None)}, 32)
    assert len(names) == 1 + teachers.count("roberta")
    rows = torch.arange(64)
    work: Any = SimpleNamespace(
        method=method, _rows={64: (rows.clone(), rows.clone())}, _packs=lambda n: True
    )
    draw, graphs = torch.Generator().manual_seed(0), {}
    for _ in range(300):
        true = {name: int(torch.randint(1600, 1900, (), generator=draw)) for name in names}
        budgets = {name: token_capacity(n) for name, n in true.items()}
        WholeStep.load(work, {"rows": rows, "lengths": dict.fromkeys(names, 30), "token_budgets": budgets})
        graph = graphs.setdefault(work.shapes.key, work.shapes)
        assert graph.token_budgets["sentence"] >= true["sentence"]
        assert set(graph.lengths) == set(names)


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
