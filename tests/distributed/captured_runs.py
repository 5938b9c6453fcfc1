"""The runs by which captured steps on several ranks are held to those of one: what they are, and what they left."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from embedlab.run.callbacks.checkpoints import LAST
from tests.distributed.captured_ranks import Spec, check_ended
from tests.methods.golden import METHODS, Inputs

WORLD = 2
EXACT = (
    "simcse", "simcse_supervised", "jtcse", "csesfp", "bepa", "promptbert", "rankcse", "rankcse_listnet", "esimcse",
    "mixcse", "mixcse_released", "pcl",
)  # fmt: skip
"""ESimCSE's queue is half a batch here: which half depends on the order of the rows, as MixCSE's neighbours do."""
LINES = METHODS | {"mixcse_released": (*METHODS["mixcse"], "method.form=released")}
EPOCHS = {
    "uneven-20": 6,
    "uneven-21": 6,
    "accumulated": 4,
    "chunked": 4,
    "skewed": 4,
    "half": 4,
    "half-fp32": 4,
}
"""Runs that are compared by their gradients' norms, and how many updates they make."""
ON_A_CARD = {"simcse_supervised": 2e-3}
"""Bounds of `gradient_error` in fp32, else 1e-4. These gradients nearly cancel: in fp32 one rank on the CPU is 9e-5 off
itself in fp64, ten times as far as the others, and two H200 were 5.5e-4 apart."""
BASICS = (
    "backbone=local", "trainer.log_every_n_steps=1", "callbacks.progress=none", "optimizer.lr=1e-3",
    "data.max_length=16", "data.report=false", "data.processes=1", "evaluation.final=[]", "evaluation.before=false",
    "backbone.dropout=1e-9",
)  # fmt: skip


def line(inputs: Inputs, name: str, world: int, *more: str) -> list[str]:
    """Overrides of a run whose batch over all ranks has 8 rows."""
    adapter = ("adapter.dropout=1e-9",) if name == "csesfp" else ()
    undrawn = {
        "jtcse": ("method.icnce=symmetric",),
        "esimcse": ("method.rate=0.0", "method.queue=0.5"),
        "pcl": ("method.augmentations=[reverse]",),
    }
    fixed = undrawn.get(name, ())
    devices = (f"trainer.devices={world}", f"trainer.strategy={'ddp' if world > 1 else 'auto'}")
    paths = ("backbone.path={bert}", "data.files={text}")
    whole = [
        *BASICS,
        *paths,
        *LINES[name],
        *adapter,
        *fixed,
        *devices,
        f"data.batch_size={8 // world}",
        *more,
    ]
    given = {o.partition("=")[0]: o for o in map(inputs.fill, whole)}
    return [*given.values(), f"data.cache_dir={inputs.folder}"]


def compared(inputs: Inputs, world: int, *more: str, precision: str) -> dict[str, Spec]:
    """Runs that are the same on any number of ranks, by name."""

    def spec(name: str, *own: str) -> Spec:
        return Spec(line(inputs, name, world, *more, f"trainer.precision={precision}", *own))

    short = ("trainer.max_steps=4", "trainer.max_epochs=9")
    # In the second step, gradients are sent as they come. Clipped ones would be the same at any scale.
    runs = {name: spec(name, "trainer.max_steps=2", "optimizer.clip=null") for name in EXACT}
    # 20 rows: batches of 8, 8 and 4, of which two ranks have 2 each; 21: the last is shared 3 to 2.
    for rows in (20, 21):
        uneven = (f"data.limit={rows}", "data.drop_last=false", "trainer.max_epochs=2")
        runs[f"uneven-{rows}"] = spec("simcse", *uneven)
    runs["accumulated"] = spec("simcse", "optimizer.accumulate=3", *short)
    runs["chunked"] = spec("simcse", "optimizer.chunk=3", *short)
    half = ("trainer.precision=bf16-mixed", *short)  # copies of weights, whose gradients come joined
    runs["half"] = spec("simcse", *half)
    runs["half-fp32"] = spec("simcse", "optimizer.reduce_dtype=fp32", *half)
    skewed = inputs.folder / "skewed.txt"
    texts = [" ".join(["dog", "river"][i % 2] for i in range(n)) + f" {n} x{n}" for n in range(1, 13)]
    skewed.write_text("\n".join([*texts, *(f"a{i} cat" for i in range(28))]) + "\n")
    runs["skewed"] = spec("simcse", f"data.files={skewed}", *short)
    return runs


def check_norms(name: str, one: list[float], two: list[float], near: float) -> None:
    """Fail where the norms of two runs of `EPOCHS` are apart by more than this share, or what bf16 rounds.

    Adam's first update is a sign: where a gradient is all rounding, bf16 turns it, and the weights are apart from then
    on (two H200 by 3.2 % of the second norm, which was the same for sums in bf16 and in fp32; the CPU by 1.4 %).
    """
    assert len(one) == EPOCHS[name]
    half = name.startswith("half")
    assert two[:1] == pytest.approx(one[:1], rel=2e-2 if half else near)
    assert two[1:] == pytest.approx(one[1:], rel=5e-2 if half else near)


def checkpoint(folder: Path) -> dict[str, Any]:
    check_ended(folder)
    return dict(torch.load(folder / LAST, weights_only=True, map_location="cpu"))


def column(folder: Path, name: str) -> list[float]:
    check_ended(folder)
    with (folder / "metrics.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


def ranks(folder: Path) -> list[dict[str, Any]]:
    check_ended(folder)
    return [json.loads((folder / f"rank{r}.json").read_text()) for r in range(WORLD)]


def gradient_error(one: Path, two: Path) -> float:
    """Largest difference of any gradient, as a share of the largest; by the first moments after two steps."""
    a, b = (checkpoint(f)["optimizer_states"][0]["state"] for f in (one, two))
    assert a.keys() == b.keys()
    largest = max(float(s["exp_avg"].abs().max()) for s in a.values())
    assert largest > 1e-4
    return max(float((b[k]["exp_avg"] - s["exp_avg"]).abs().max()) / largest for k, s in a.items())
