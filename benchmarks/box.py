"""Sentences a second of several encoders on the CPU, in turn, and what their folders weigh.

    python -m benchmarks.box CKPT … [--threads 2] [--sentences 256] [--rounds 10] [--json OUT]

The text is gensim's Wikipedia sentences (extra `quickstart`), raw strings to rows of numpy. A round encodes them once
by each encoder. The fastest round counts where the machine has other work too, and the processor's own
seconds: with one thread they say what an encoder costs, whatever else runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import embedlab
from embedlab.data.packages import gensim_wikipedia
from embedlab.files import assets_dir


def megabytes(ckpt: str) -> float:
    """The folder's files: weights, tokenizer, card."""
    folder = Path(ckpt) if Path(ckpt).is_dir() else assets_dir() / ckpt
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6


def measure(ckpts: Sequence[str], texts: list[str], rounds: int) -> list[dict[str, Any]]:
    """A record for each encoder."""
    encoders = {ckpt: embedlab.load(ckpt) for ckpt in ckpts}
    clocks = (time.perf_counter, time.process_time)
    times: dict[str, list[tuple[float, float]]] = {ckpt: [] for ckpt in ckpts}
    for turn in range(rounds + 1):
        for ckpt, encoder in encoders.items():
            start = [clock() for clock in clocks]
            encoder.encode(texts)
            wall, cpu = (clock() - begun for clock, begun in zip(clocks, start, strict=True))
            if turn:  # the first one warms up
                times[ckpt].append((wall, cpu))
    return [
        {
            "encoder": Path(ckpt).name,
            "blocks": encoder.towers[0].backbone.info.layers,
            "dim": encoder.dim,
            "parameters": sum(p.numel() for p in encoder.parameters()) / 1e6,
            "megabytes": megabytes(ckpt),
            "tokens": statistics.fmean(map(len, encoder.tokenization.ids(texts))),
            "fastest": len(texts) / min(wall for wall, _ in times[ckpt]),
            "median": len(texts) / statistics.median(wall for wall, _ in times[ckpt]),
            "per_processor_second": len(texts) / statistics.median(cpu for _, cpu in times[ckpt]),
        }
        for ckpt, encoder in encoders.items()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ckpts", nargs="+")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sentences", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    texts = [text for (text,) in islice(gensim_wikipedia(), args.sentences)]
    found = measure(args.ckpts, texts, args.rounds)
    for row in found:
        told = ", ".join(f"{row[key]:,.0f} {key}" for key in ("fastest", "median", "per_processor_second"))
        print(f"{row['encoder']}: sentences/s {told}")
    if args.json:
        facts = {
            "threads": args.threads,
            "sentences": len(texts),
            "rounds": args.rounds,
            "torch": torch.__version__,
        }
        args.json.write_text(json.dumps({**facts, "encoders": found}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
