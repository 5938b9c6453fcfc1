"""The work of a captured step and the loop around it, without a device: records, updates, schedule and resume are those
of eager."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embedlab.engine.meter import Meter
from embedlab.run.callbacks.checkpoints import LAST, Interrupted
from embedlab.run.run import train
from tests.engine.test_cuda_graph import by_step
from tests.run.test_resume import StopAt
from tests.tiny_run import sentences

NAMES = ("train/loss", "train/grad_norm", "lr")


@pytest.fixture
def run(compose_run, tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    def go(step: str, name: str, *overrides: str, stop: int | None = None) -> Path:
        with monkeypatch.context() as patch:
            # A captured step computes padding here: without it, dropout would draw for other shapes.
            config = compose_run("trainer.max_steps=6", "trainer.max_epochs=4", "unpad=false", *overrides)
            for room in ("check", "run", "finish"):
                patch.setattr(f"embedlab.run.{room}.resolved_step", lambda run: step)
            patch.setattr("embedlab.backbones.backbone.Backbone.compile_blocks", lambda self, **k: None)
            if stop is None:
                train(config, tmp_path / name)
            else:
                StopAt(stop, patch)
                with pytest.raises(Interrupted):
                    train(config, tmp_path / name)
        return tmp_path / name

    return go


def same(one: Path, other: Path) -> None:
    for name in NAMES:
        wanted, found = by_step(one, name), by_step(other, name)
        assert list(wanted) == list(range(1, 7))
        assert found == pytest.approx(wanted, rel=1e-4), name
    a, b = (torch.load(f / LAST, weights_only=True) for f in (one, other))
    assert a["global_step"] == b["global_step"] == 6
    assert all(int(s["step"]) == 6 for s in b["optimizer_states"][0]["state"].values())


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_records_and_updates_are_those_of_eager(run, accumulate: int) -> None:  # type: ignore[no-untyped-def]
    """An epoch has 7 batches: its last is an update of its own."""
    more = (f"optimizer.accumulate={accumulate}",)
    same(run("eager", "eager", *more), run("graph", "graph", *more))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("first", "second"), [("graph", "eager"), ("eager", "graph"), ("graph", "graph")])
def test_a_run_goes_on_with_either_kind_of_step(run, first: str, second: str, accumulate: int) -> None:  # type: ignore[no-untyped-def]
    more = (f"optimizer.accumulate={accumulate}",)
    whole = run(first, "whole", *more)
    run(first, "parts", *more, stop=3)
    same(whole, run(second, "parts", *more, "ckpt_path=last"))


def test_the_schedule_ends_with_the_updates(run) -> None:  # type: ignore[no-untyped-def]
    """Without a limit of steps: two epochs of 7 batches are 8 updates."""
    more = ("trainer.max_steps=-1", "trainer.max_epochs=2", "optimizer.accumulate=2")
    one, other = (by_step(run(step, step, *more), "lr") for step in ("eager", "graph"))
    assert list(one) == list(range(1, 9))
    assert other == pytest.approx(one)
    assert other[8] == pytest.approx(0.0, abs=1e-12)


def test_a_checkpoint_waits_for_the_records_before_it(run, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """On a device they come to the host later."""
    arrived = Meter.arrived
    late: Any = lambda self, wait=False: arrived(self, wait) if wait else []  # noqa: E731
    monkeypatch.setattr(Meter, "arrived", late)
    run("eager", "parts", stop=3)
    assert list(by_step(run("eager", "parts", "ckpt_path=last"), "train/loss")) == list(range(1, 7))


def test_means_are_over_what_was_added() -> None:
    meter = Meter()
    totals: Tensor = torch.tensor([[6.0, 4.0], [3.0, 1.0]])
    meter.add_sum(totals, ["loss", "grad_norm"])
    meter.flush(1)
    assert meter.arrived() == [(1, {"loss": 2.0, "grad_norm": 4.0})]
    assert not totals.any()


OWN_DATA = {
    "angle in a mix": (
        "data=mix", "data.mix.a={{name: scored, files: {rated}, score_range: [0, 5]}}",
        "data.mix.b={{name: triplets, files: {triplets}, negatives: 2}}", "method.objective=angle",
        "method.cosent_weight=0.5", "data.no_duplicates=true",
    ),
    "labels": ("data=labelled", "data.files={labelled}", "data.per_label=2", "method.objective=multi_positive"),
    "teacher": (
        "data=triplets", "data.files={triplets}", "data.negatives=2", "data.scores=true", "method.objective=kl",
        "method.add_in_batch=true", "method.matryoshka.dims=[32,8]",
    ),
    "guide": ("data=pairs", "data.files={pairs}", "method.objective=gist", "method.guide={guide}"),
    "guide's vectors of a mix": (
        "data=mix", "data.mix.a={{name: pairs, files: {pairs}}}",
        "data.mix.b={{name: triplets, files: {triplets}, negatives: 2}}", "method.objective=gist",
        "method.guide={guide}", "method.cached=true",
    ),
    "scale": ("data=pairs", "data.files={pairs}", "method.objective=sigmoid", "optimizer.weight_decay=0.1"),
}  # fmt: skip


@pytest.fixture
def own_files(tmp_path: Path, tiny: Callable[..., Path]) -> dict[str, Path]:
    texts = sentences(120, seed=9)
    heads = {"pairs": "anchor,positive", "rated": "sentence1,sentence2,score", "labelled": "text,label",
             "triplets": "anchor,positive,negative_1,negative_2,score_0,score_1,score_2"}  # fmt: skip
    rows: dict[str, list[str]] = {name: [] for name in heads}
    for i in range(0, 120, 4):
        a, b, c, d = texts[i : i + 4]
        rows["pairs"].append(f"{a},{b}")
        rows["rated"].append(f"{a},{b},{i % 6}")
        rows["triplets"].append(f"{a},{b},{c},{d},3,{i % 5},-1")
        rows["labelled"] += [f"{a},x{i % 7}", f"{b},x{i % 7}"]
    found = {}
    for name, head in heads.items():
        found[name] = tmp_path / f"{name}.csv"
        found[name].write_text("\n".join([head, *rows[name]]) + "\n")
    return found | {"guide": tiny("roberta", width=16)}


@pytest.mark.parametrize("case", OWN_DATA)
def test_ones_own_data_as_in_the_eager_step(run: Any, case: str, own_files: dict[str, Path]) -> None:
    own = ["method=supervised", "data.max_length=32", *(s.format(**own_files) for s in OWN_DATA[case])]
    same(run("eager", "eager", *own), run("graph", "graph", *own))
