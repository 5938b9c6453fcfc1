"""Whether the kinds of step train alike: their losses with weights that stand still, without dropout, and gradients.

    python -m benchmarks.step_kinds [--cases simcse,roberta,promptbert] [--kinds eager,compile,graph] [--json OUT]
        [--parts still,moving,gradients] [--backbone mini] [--poolings cls,mean] [--sentences FILE] [--tiny]

Batch 64, on one card in bf16: ``eager``, ``compile``, ``compile random`` (compiled, with torch's own random numbers:
`torch._inductor.config.fallback_random`), ``compile casts`` (compiled, rounding where eager steps do:
`emulate_precision_casts`), ``graph`` (fused blocks), ``graph compiled`` (the same without padding, by compiled blocks)
and ``graph padded``. Cases: ``simcse`` on a backbone by each pooling; ``roberta``, SimCSE on random weights of
RoBERTa-base's shape; ``promptbert`` by its two templates, on those of BERT-base's. Questions, on the same batches:

- ``still``: dropout 0.1, a rate of 1e-12. Losses and gradient norms differ by the masks alone, and are independent from
  batch to batch, so that the mean difference from eager steps is 0 within its standard error if all draw dropout alike.
  ``z`` is its share of it: beyond 3 is a difference.
- ``moving``: no dropout, the recipe's rate. Losses differ by rounding: the largest difference from eager of the first
  10 steps, the mean one of all, and the means of the last 50.
- ``gradients``: no dropout, weights that stand still. The norm of a gradient's difference from that in fp64 (by eager
  steps) as a share of the latter's: of all parameters, and of the worst one. Left out are those whose gradient is
  nothing (keys' biases: softmax does not see them).

Without a card `--tiny` goes through all of it with eager steps.
"""

from __future__ import annotations

import argparse
import csv
import gc
import io
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.scaling import sentences
from benchmarks.step_methods import CASES as METHODS
from benchmarks.step_methods import Inputs
from benchmarks.training_step import read

KINDS = {
    "eager": ("step=eager", ""),
    "compile": ("step=compile", ""),
    "compile random": ("step=compile", ""),
    "compile casts": ("step=compile", ""),
    "graph": ("step=graph", ""),
    "graph compiled": ("step=graph", "fused_block=0"),
    "graph padded": ("step=graph", ""),
}
"""The kind of step, and EMBEDLAB_KERNELS."""
RATES = {"simcse": 3e-5, "roberta": 1e-5, "promptbert": 1e-5}
LAST = 50
NOTHING = 1e-6
"""Of the whole gradient's norm: what a parameter must have to count."""

Gradients = list[dict[str, Tensor]]
"""Of each batch, by the names of the parameters."""


@contextmanager
def kind_of_step(kind: str, dry: bool) -> Iterator[list[str]]:
    """The settings of a kind, in its surroundings; ``dry``: of eager steps."""
    from torch._inductor import config as inductor

    step, kernels = KINDS[kind]
    torch._dynamo.reset()
    with (
        mock.patch.dict(os.environ, {"EMBEDLAB_KERNELS": kernels}),
        inductor.patch(
            fallback_random=kind == "compile random", emulate_precision_casts=kind == "compile casts"
        ),
    ):
        yield ["step=eager" if dry else step, *(["unpad=false"] if kind == "graph padded" else [])]
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run(kind: str, folder: Path, settings: list[str], dry: bool = False) -> dict[str, list[float]]:
    """Losses and gradient norms of all steps."""
    from embedlab.cli.compose import compose
    from embedlab.run.parse import parse_run
    from embedlab.run.run import train

    with kind_of_step(kind, dry) as more, redirect_stdout(io.StringIO()):
        train(parse_run(compose("train", [*settings, *more])), folder)
    with (folder / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("train/loss")]
    return {name: [float(row[f"train/{name}"]) for row in rows] for name in ("loss", "grad_norm")}


def gradients(kind: str, folder: Path, settings: list[str], dry: bool, double: bool = False) -> Gradients:
    """Of each step, read from AdamW's first moment, which every kind keeps.

    Args:
        kind: of step.
        folder: of the run.
        settings: of steps that clip no gradient.
        dry: by eager steps.
        double: in fp64, whatever the settings say.
    """
    from lightning.pytorch import Callback

    from embedlab.cli.compose import compose
    from embedlab.run.parse import parse_run
    from embedlab.run.run import Run

    found: Gradients = []

    class Moments(Callback):
        def __init__(self) -> None:
            self.before: dict[str, Tensor] = {}

        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            optimizer = trainer.optimizers[0]
            beta = optimizer.param_groups[0]["betas"][0]
            now = {
                name: optimizer.state[p]["exp_avg"].to(torch.float64, copy=True)
                for name, p in module.named_parameters()
                if "exp_avg" in optimizer.state.get(p, {})
            }
            found.append({n: (m - beta * self.before.get(n, 0.0)) / (1 - beta) for n, m in now.items()})
            self.before = now

    with kind_of_step(kind, dry) as more:
        precision = ["trainer.precision=32-true"] if double else []
        config = parse_run(compose("train", [*settings, *more, *precision]))
        own = Run(config, folder, extra={"callbacks": [Moments()]})
        if double:
            own.method.double()
        try:
            own.trainer.fit(own.method, datamodule=own.data)
        finally:
            own.method.runner.close()
    return found


def compare(found: dict[str, list[float]], eager: dict[str, list[float]]) -> dict[str, float]:
    row: dict[str, float] = {}
    for name, values in found.items():
        apart = [a - b for a, b in zip(values, eager[name], strict=True)]
        error = statistics.stdev(apart) / len(apart) ** 0.5
        row |= {
            name: statistics.mean(values), f"{name}_sd": statistics.stdev(values),
            f"{name}_apart": statistics.mean(apart), f"{name}_z": statistics.mean(apart) / error if error else 0.0,
            f"{name}_first": max(map(abs, apart[:10])), f"{name}_mean": statistics.mean(map(abs, apart)),
            f"{name}_last": statistics.mean(values[-LAST:]), f"{name}_last_apart": statistics.mean(apart[-LAST:]),
        }  # fmt: skip
    return row


def errors(found: Gradients, exact: Gradients) -> dict[str, Any]:
    """How far gradients are from exact ones: all parameters' by batches, and the worst parameter's."""
    whole: list[float] = []
    worst: list[tuple[float, str]] = []
    for ours, true in zip(found, exact, strict=True):
        assert ours.keys() == true.keys()
        norms = {n: float(g.norm()) for n, g in true.items()}
        apart = {n: float((ours[n] - g).norm()) for n, g in true.items()}
        norm = sum(v**2 for v in norms.values()) ** 0.5
        whole.append(sum(v**2 for v in apart.values()) ** 0.5 / norm)
        worst.append(max((apart[n] / v, n) for n, v in norms.items() if v > NOTHING * norm))
    share, name = max(worst)
    return {"whole": statistics.mean(whole), "whole_each": whole, "worst": share, "worst_parameter": name}


class Comparison:
    """The parts of the cases, and a file that has what was found so far."""

    def __init__(self, home: Path, options: argparse.Namespace, changes: list[str]) -> None:
        self.home, self.options, self.changes = home, options, changes
        self.dry = options.tiny and not torch.cuda.is_available()
        self.inputs = Inputs(home, options.tiny, options.layers)
        self.began = time.perf_counter()
        self.rows: dict[str, Any] = {}
        steps = {"still": options.still, "moving": options.moving, "gradients": options.gradients}
        self.steps = {part: steps[part] for part in options.parts.split(",")}
        count = max(self.steps.values()) * options.batch
        texts = read(options.sentences, count) if options.sentences else sentences(count)
        (home / "text.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")

    def settings(self, case: str, pooling: str) -> list[str]:
        """Of a model and a method."""
        if case == "simcse":
            return [f"backbone={self.options.backbone}", f"pooling={pooling}"]
        model, method = {"roberta": ("roberta", "simcse"), "promptbert": ("bert", "promptbert")}[case]
        return [
            "backbone=local",
            f"backbone.path={self.inputs.model(model)}",
            *(s.format() for s in METHODS[method].settings),
        ]

    def part(self, case: str, pooling: str, part: str) -> None:
        options = self.options
        label = pooling if case == "simcse" else case
        dropout, rate = {"still": (0.1, 1e-12), "moving": (1e-9, RATES[case]), "gradients": (1e-9, 1e-12)}[
            part
        ]
        settings = [
            *self.settings(case, pooling), f"backbone.dropout={dropout}", f"data.files={self.home / 'text.txt'}",
            f"data.cache_dir={self.home / 'cache'}", "data.report=false", f"data.batch_size={options.batch}",
            f"optimizer.lr={rate}", "optimizer.schedule=constant", f"trainer.max_steps={self.steps[part]}",
            "trainer.log_every_n_steps=1", "callbacks.progress=none", "callbacks.checkpoint.at_end=false",
            "evaluation.final=[]", "evaluation.before=false", "evaluation.select=last", *self.changes,
        ]  # fmt: skip
        if part == "gradients":
            settings.append("optimizer.clip=null")
        first: Any = None
        exact = ["fp64"] if part == "gradients" else []
        for kind in [*exact, *options.kinds.split(",")]:
            if time.perf_counter() - self.began > options.seconds:
                print(f"{label:10} {part:9} {kind:15} left out: no time", flush=True)
                continue
            folder = self.home / f"{label} {part} {kind}".replace(" ", "_")
            began = time.perf_counter()
            try:
                if part == "gradients":
                    double = kind == "fp64"
                    found = gradients("eager" if double else kind, folder, settings, self.dry, double)
                    if double:
                        first = found
                        continue
                    row = errors(found, first)
                else:
                    losses = run(kind, folder, settings, self.dry)
                    first = losses if kind == "eager" else first
                    row = compare(losses, first) | {"losses": losses["loss"] if part == "moving" else []}
            except Exception as error:  # the other kinds are worth having
                said = " ".join(str(error).split())[:200]
                print(f"{label:10} {part:9} {kind:15} failed: {type(error).__name__}: {said}", flush=True)
                continue
            self.keep(label, part, kind, row | {"seconds": time.perf_counter() - began})

    def keep(self, label: str, part: str, kind: str, row: dict[str, Any]) -> None:
        self.rows[f"{label} {part} {kind}"] = row
        if part == "gradients":
            values = f"{row['whole']:.3e} of the gradient, {row['worst']:.3e} of {row['worst_parameter']}"
        else:
            values = (
                f"{row['loss']:8.4f} {row['loss_apart']:9.5f} {row['loss_z']:6.2f} {row['grad_norm']:8.4f} "
                f"{row['grad_norm_z']:6.2f} {row['loss_first']:9.6f} {row['loss_mean']:9.6f} "
                f"{row['loss_last']:8.4f} {row['loss_last_apart']:9.5f}"
            )
        print(f"{label:10} {part:9} {kind:15} {values}", flush=True)
        if self.options.json:
            device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
            facts = {
                "device": device,
                "torch": torch.__version__,
                "date": time.strftime("%Y-%m-%d"),
                "layers": self.options.layers,
                "batch": self.options.batch,
                "steps": self.steps,
                "rows": self.rows,
            }
            self.options.json.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default="simcse", help="by commas: simcse, roberta, promptbert")
    parser.add_argument("--parts", default="still,moving", help="by commas: still, moving, gradients")
    parser.add_argument("--backbone", default="mini", help="of simcse")
    parser.add_argument("--poolings", default="cls", help="of simcse")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--sentences", type=Path, help="one a line; made up where there is none")
    parser.add_argument("--layers", type=int, default=12, help="of the random models")
    parser.add_argument("--still", type=int, default=200, help="steps")
    parser.add_argument("--moving", type=int, default=100, help="steps")
    parser.add_argument("--gradients", type=int, default=4, help="batches")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no run begins")
    parser.add_argument("--tiny", action="store_true", help="shapes of the tests")
    parser.add_argument("--json", type=Path)
    options, changes = parser.parse_known_args(arguments)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    print(f"{'case':10} {'part':9} {'kind':15} {'loss':>8} {'apart':>9} {'z':>6} {'norm':>8} {'z':>6} "
          f"{'first 10':>9} {'mean':>9} {'last 50':>8} {'apart':>9}")  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        comparison = Comparison(Path(name), options, changes)
        for case in options.cases.split(","):
            for pooling in options.poolings.split(",") if case == "simcse" else [""]:
                for part in comparison.steps:
                    comparison.part(case, pooling, part)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
