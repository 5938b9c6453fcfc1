"""The work of a captured step on several ranks, without a card: gloo ranks run it piece by piece in the graph's order."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from embedlab.run.callbacks.checkpoints import LAST
from tests.distributed.captured_ranks import train_all, train_on_ranks
from tests.methods.golden import METHODS, Inputs

WORLD = 2
EXACT = ("simcse", "simcse_supervised", "jtcse", "csesfp", "bepa", "promptbert")
BASICS = (
    "backbone=local", "trainer=cpu", "trainer.log_every_n_steps=1", "callbacks.progress=none", "optimizer.lr=1e-3",
    "data.max_length=16", "data.report=false", "data.processes=1", "evaluation.final=[]", "evaluation.before=false",
    "backbone.dropout=1e-9",
)  # fmt: skip


def line(inputs: Inputs, name: str, world: int, *more: str) -> list[str]:
    """Overrides of a run whose batch over all ranks has 8 rows."""
    adapter = ("adapter.dropout=1e-9",) if name == "csesfp" else ()
    fixed = ("method.icnce=symmetric",) if name == "jtcse" else ()
    devices = (f"trainer.devices={world}", f"trainer.strategy={'ddp' if world > 1 else 'auto'}")
    paths = ("backbone.path={bert}", "data.files={text}")
    whole = [
        *BASICS,
        *paths,
        *METHODS[name],
        *adapter,
        *fixed,
        *devices,
        f"data.batch_size={8 // world}",
        *more,
    ]
    given = {o.partition("=")[0]: o for o in map(inputs.fill, whole)}
    return [*given.values(), f"data.cache_dir={inputs.folder}"]


def checkpoint(folder: Path) -> dict[str, Any]:
    return dict(torch.load(folder / LAST, weights_only=True))


def column(folder: Path, name: str) -> list[float]:
    with (folder / "metrics.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one rank (``one/NAME``) and of two (``two/NAME``)."""
    root = tmp_path_factory.mktemp("captured")
    inputs = Inputs(root / "inputs")
    exact = ("trainer.precision=64-true", "trainer.max_steps=1")
    runs: dict[str, Sequence[str]] = {name: (name, *exact) for name in EXACT}
    # 20 rows: batches of 8, 8 and 4, of which two ranks have 2 each; 21: the last is shared 3 to 2.
    for rows in (20, 21):
        runs[f"uneven-{rows}"] = (
            "simcse",
            f"data.limit={rows}",
            "data.drop_last=false",
            "trainer.max_epochs=2",
        )
    runs["accumulated"] = ("simcse", "optimizer.accumulate=3", "trainer.max_steps=4", "trainer.max_epochs=9")
    for world, name in ((1, "one"), (WORLD, "two")):
        lines = {
            str(root / name / run): line(inputs, *args[:1], world, *args[1:]) for run, args in runs.items()
        }
        if world == 1:
            train_all(lines)
        else:
            assert train_on_ranks(lines, world, root) == 0
    return root


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", EXACT)
def test_the_gradient_is_that_of_the_whole_batch(name: str, trained: Path) -> None:
    """By the first moments after one step, a tenth of the gradient."""
    one, two = (checkpoint(trained / w / name)["optimizer_states"][0]["state"] for w in ("one", "two"))
    assert one.keys() == two.keys()
    largest = max(float(s["exp_avg"].abs().max()) for s in one.values())
    assert largest > 1e-4
    for key, state in one.items():
        error = float((two[key]["exp_avg"] - state["exp_avg"]).abs().max()) / largest
        assert error < 1e-6, (key, error)


@pytest.mark.parametrize("name", ["uneven-20", "uneven-21", "accumulated"])
def test_a_run_on_two_ranks_is_the_run_on_one(name: str, trained: Path) -> None:
    one, two = (trained / w / name for w in ("one", "two"))
    norms = column(one, "train/grad_norm")
    assert len(norms) == (4 if name == "accumulated" else 6)
    assert column(two, "train/grad_norm") == pytest.approx(norms, rel=1e-3)
    a, b = (checkpoint(f)["state_dict"] for f in (one, two))
    for key, value in a.items():
        torch.testing.assert_close(b[key], value, rtol=1e-3, atol=2e-4)
