"""Whether the kinds of step train alike: their losses with weights that stand still, and without dropout.

    python -m benchmarks.step_kinds [--backbone mini] [--poolings cls,mean] [--sentences FILE] [--json OUT]

SimCSE, batch 64, on one card in bf16: ``eager``, ``compile``, ``compile random`` (compiled, with torch's own random
numbers: `torch._inductor.config.fallback_random`), ``compile casts`` (compiled, rounding where eager steps do:
`emulate_precision_casts`), ``graph`` (fused blocks), ``graph compiled`` (the same without padding, by compiled blocks)
and ``graph padded``. Against eager steps on the same batches, two questions:

- ``still``: dropout 0.1, a rate of 1e-12. Losses and gradient norms differ by the masks alone, and are independent from
  batch to batch, so that the mean difference is 0 within its standard error if all draw dropout alike. ``z`` is its
  share of it: beyond 3 is a difference.
- ``moving``: no dropout, the recipe's rate. Losses differ by rounding: the largest difference of the first 10 steps,
  and the mean one of all.
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.scaling import sentences
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


def run(kind: str, folder: Path, settings: list[str]) -> dict[str, list[float]]:
    """Losses and gradient norms of all steps."""
    from torch._inductor import config as inductor

    from embedlab.cli.compose import compose
    from embedlab.run.parse import parse_run
    from embedlab.run.run import train

    step, kernels = KINDS[kind]
    padded = ["unpad=false"] if kind == "graph padded" else []
    torch._dynamo.reset()
    with (
        mock.patch.dict(os.environ, {"EMBEDLAB_KERNELS": kernels}),
        inductor.patch(
            fallback_random=kind == "compile random", emulate_precision_casts=kind == "compile casts"
        ),
    ):
        train(parse_run(compose("train", [*settings, step, *padded])), folder)
    with (folder / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("train/loss")]
    return {name: [float(row[f"train/{name}"]) for row in rows] for name in ("loss", "grad_norm")}


def compare(found: dict[str, list[float]], eager: dict[str, list[float]]) -> dict[str, float]:
    row: dict[str, float] = {}
    for name, values in found.items():
        apart = [a - b for a, b in zip(values, eager[name], strict=True)]
        error = statistics.stdev(apart) / len(apart) ** 0.5
        row |= {
            name: statistics.mean(values), f"{name}_sd": statistics.stdev(values),
            f"{name}_apart": statistics.mean(apart), f"{name}_z": statistics.mean(apart) / error if error else 0.0,
            f"{name}_first": max(map(abs, apart[:10])), f"{name}_mean": statistics.mean(map(abs, apart)),
        }  # fmt: skip
    return row


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backbone", default="mini")
    parser.add_argument("--poolings", default="cls")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--sentences", type=Path, help="one a line; made up where there is none")
    parser.add_argument("--still", type=int, default=200, help="steps")
    parser.add_argument("--moving", type=int, default=100, help="steps")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--json", type=Path)
    options, changes = parser.parse_known_args(arguments)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    rows = max(options.still, options.moving) * options.batch
    texts = read(options.sentences, rows) if options.sentences else sentences(rows)
    results: dict[str, Any] = {}
    print(f"{'pooling':8} {'part':7} {'kind':15} {'loss':>8} {'apart':>9} {'z':>6} {'norm':>8} {'z':>6} "
          f"{'first 10':>9} {'mean':>9}")  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        (home / "text.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
        for pooling in options.poolings.split(","):
            for part, steps, dropout, rate in (
                ("still", options.still, 0.1, 1e-12),
                ("moving", options.moving, 1e-9, 3e-5),
            ):
                settings = [
                    f"backbone={options.backbone}", f"backbone.dropout={dropout}", f"pooling={pooling}",
                    f"data.files={home / 'text.txt'}", f"data.cache_dir={home / 'cache'}", "data.report=false",
                    f"data.batch_size={options.batch}", f"optimizer.lr={rate}", "optimizer.schedule=constant",
                    f"trainer.max_steps={steps}", "trainer.log_every_n_steps=1", "callbacks.progress=none",
                    "callbacks.checkpoint.at_end=false", "evaluation.final=[]", "evaluation.before=false",
                    "evaluation.select=last", *changes,
                ]  # fmt: skip
                runs: dict[str, Any] = {}
                for kind in options.kinds.split(","):
                    folder = home / f"{pooling} {part} {kind}".replace(" ", "_")
                    try:
                        runs[kind] = run(kind, folder, settings)
                        row = compare(runs[kind], runs["eager"])
                    except Exception as error:  # the other kinds are worth having
                        print(
                            f"{pooling:8} {part:7} {kind:15} failed: {type(error).__name__}: {str(error)[:200]}"
                        )
                        continue
                    results[f"{pooling} {part} {kind}"] = row
                    print(f"{pooling:8} {part:7} {kind:15} {row['loss']:8.4f} {row['loss_apart']:9.5f} "
                          f"{row['loss_z']:6.2f} {row['grad_norm']:8.4f} {row['grad_norm_z']:6.2f} "
                          f"{row['loss_first']:9.6f} {row['loss_mean']:9.6f}", flush=True)  # fmt: skip
    if options.json:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        facts = {"device": device, "torch": torch.__version__, "rows": results}
        options.json.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
