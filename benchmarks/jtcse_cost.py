"""What a twin costs: a training step of JTCSE and its relatives against one of SimCSE, on the same sentences.

    python benchmarks/jtcse_cost.py [--batch 64] [--steps 240] [--rounds 3] [--out FILE] [key=value ...]

``key=value`` changes every arm: ``backbone=local backbone.path=DIR``, ``data.files=FILE``, ``data.max_length=64``,
``trainer=cpu``, ``step=...``. Arms, each a run of this project under its own trainer, in turn, `rounds` times:

    simcse       one tower, two views: the unit
    tncse        two towers, no side stream
    jtcse n=3    side streams from a third of the depth on (arithmetic: 1.75 x tncse)
    jtcse n=6    side streams from a sixth on (1.92 x)
    jtcse n=3 in-stream

The second tower is the first with a little noise: a step does not ask what the weights are. Times are medians of the
steps in the second half; memory is the peak that CUDA's allocator gave out.
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

ARMS: dict[str, list[str]] = {
    "simcse": ["method=simcse", "method.mlp=none"],
    "tncse": ["method=tncse"],
    "jtcse n=3": ["method=jtcse", "method.n_ca=3"],
    "jtcse n=6": ["method=jtcse", "method.n_ca=6"],
    "jtcse n=3 in-stream": ["method=jtcse", "method.n_ca=3", "method.wiring=instream"],
}


def second_tower(overrides: list[str], folder: Path) -> Path:
    """The backbone of these overrides with noise of a hundredth of each weight's spread."""
    from embedlab.backbones import load_backbone
    from embedlab.cli.compose import compose
    from embedlab.encoders.encoder import SentenceEncoder
    from embedlab.encoders.tokenization import Tokenization
    from embedlab.pooling import build_pooling
    from embedlab.run.parse import parse_run

    config = parse_run(compose("train", overrides))
    backbone, tokenizer = load_backbone(config.backbone)
    with torch.no_grad():
        for p in backbone.parameters():
            p.add_(torch.randn_like(p) * (0.01 * float(p.std(correction=0)) + 1e-6))
    SentenceEncoder(backbone, build_pooling("cls", backbone.info), Tokenization(tokenizer)).save(folder)
    return folder


def measure(overrides: list[str], folder: Path) -> tuple[list[float], float]:
    """Milliseconds of each step in the second half, and the peak memory in bytes (0 on the CPU)."""
    from embedlab.cli.compose import compose
    from embedlab.run.parse import parse_run
    from embedlab.run.run import train

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    train(parse_run(compose("train", overrides)), folder)
    with (folder / "metrics.csv").open() as file:
        times = [float(row["speed/step_ms"]) for row in csv.DictReader(file) if row.get("speed/step_ms")]
    # The host runs ahead until the queue of the device is full: the first half shows launches, not steps.
    return times[len(times) // 2 :], float(torch.cuda.max_memory_allocated()) if cuda else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--out", type=Path)
    settings, changes = parser.parse_known_args()
    every = max(1, settings.steps // 12)
    common = [
        "pooling=cls", "optimizer.clip=null", "optimizer.schedule=constant", "optimizer.lr=1e-6",
        f"data.batch_size={settings.batch}", f"trainer.max_steps={settings.steps}", "trainer.max_epochs=1000",
        f"trainer.log_every_n_steps={every}", "evaluation.final=[]", "evaluation.before=false",
        "evaluation.select=last", "callbacks.progress=none", "callbacks.checkpoint.at_end=false",
        "data.report=false", *changes,
    ]  # fmt: skip
    times: dict[str, list[float]] = {arm: [] for arm in settings.arms}
    memory: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        tower = second_tower(common, home / "tower2")
        for turn in range(settings.rounds):
            for arm in settings.arms:
                towers = [] if arm == "simcse" else [f"method.tower2={tower}"]
                found, peak = measure(
                    [*ARMS[arm], *towers, *common], home / f"{arm} {turn}".replace(" ", "_")
                )
                times[arm] += found
                memory[arm] = max(memory.get(arm, 0.0), peak)
    report(times, memory, settings)


def report(times: dict[str, list[float]], memory: dict[str, float], settings: Any) -> None:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU"
    medians = {arm: statistics.median(found) for arm, found in times.items()}
    unit = medians.get("simcse", next(iter(medians.values())))
    heads = ("arm", "ms a step", "quartiles", "steps/s", "x simcse", "x two simcse", "peak GiB")
    table = Table(title=f"batch {settings.batch}, {device}")
    for i, head in enumerate(heads):
        table.add_column(head, justify="left" if i == 0 else "right")
    for arm, found in times.items():
        low, _, high = statistics.quantiles(found, n=4) if len(found) > 1 else (found[0],) * 3
        ms = medians[arm]
        table.add_row(
            arm,
            f"{ms:.2f}",
            f"{low:.2f}–{high:.2f}",
            f"{1e3 / ms:.2f}",
            f"{ms / unit:.2f}",
            f"{ms / unit / 2:.2f}",
            f"{memory[arm] / 2**30:.2f}" if memory[arm] else "-",
        )
    Console(width=120).print(table)
    if settings.out is not None:
        rows = {a: {"ms": times[a], "median_ms": medians[a], "peak_bytes": memory[a]} for a in times}
        content = {"device": device, "torch": torch.__version__, "batch": settings.batch, "arms": rows}
        settings.out.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
