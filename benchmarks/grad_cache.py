"""Cached gradients (``optimizer.chunk``): what a batch costs in chunks, and the memory that it saves.

    python -m benchmarks.grad_cache --backbone FOLDER --sentences FILE [--batch 512] [--chunks 512,256,128]
                                    [--layers 12] [--step compile] [--json OUT]

Unsupervised SimCSE of BERT's shape under Lightning's trainer on the same sentences: the whole batch at once, then in
chunks of that many rows (a sentence has two, one a view), whose forward pass runs twice. By arithmetic a step takes 4/3
of the time (Gao et al. 2021, arXiv 2101.06983, measured 1.2). All arms run with the same ``--step``: a captured step
takes no chunks.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.training_step import architecture, read, this_project


def peak() -> int | None:
    """Bytes of the card at most since the last call; None on the CPU."""
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return found


def measure(
    folder: Path, texts: list[str], batch: int, chunks: list[int], steps: int, step: str
) -> list[dict[str, Any]]:
    """A row for the whole batch and one for each chunk: seconds a step, ratio to the whole batch's, peak memory."""
    rows: list[dict[str, Any]] = []
    peak()
    for chunk in (None, *chunks):
        more = () if chunk is None else (f"optimizer.chunk={chunk}",)
        seconds, _ = this_project(folder, texts, batch, steps, step, more)
        ratio = seconds / rows[0]["seconds"] if rows else 1.0
        rows.append({"chunk": chunk, "seconds": seconds, "ratio": ratio, "peak_bytes": peak()})
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backbone", type=Path, required=True, help="folder whose tokenizer is used")
    parser.add_argument("--sentences", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--chunks", default="512,256,128")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--step", default="compile" if torch.cuda.is_available() else "eager")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)

    chunks = [int(c) for c in options.chunks.split(",")]
    texts = read(options.sentences, options.batch * options.steps)
    folder = architecture(options.backbone, options.layers)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    rows = measure(folder, texts, options.batch, chunks, options.steps, options.step)
    print(f"{device}, torch {torch.__version__}, batch {options.batch}, step={options.step}")
    for row in rows:
        memory = "" if row["peak_bytes"] is None else f"   peak {row['peak_bytes'] / 2**20:8,.0f} MiB"
        name = "whole batch" if row["chunk"] is None else f"chunks of {row['chunk']} rows"
        print(f"{name:<19} {1e3 * row['seconds']:9.2f} ms   {row['ratio']:.2f}x{memory}")
    if options.json:
        facts = {"device": device, "torch": torch.__version__, "batch": options.batch, "step": options.step}
        options.json.write_text(json.dumps({**facts, "arms": rows}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
