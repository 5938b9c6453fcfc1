"""What scoring while training costs: the same run with and without it.

    python -m benchmarks.dev_scoring --backbone FOLDER --sentences FILE [--batch 64] [--layers 12] [--json OUT]

Unsupervised SimCSE on random weights of BERT-base's shape with the folder's tokenizer, as in `training_step.py`. The
development set has the size of STS-B's: 1,500 pairs of short sentences cut from the file, with random ratings (which
cost what true ones do), unless ``--sts`` names a folder. The clock starts after two scorings, so that graphs are there,
and runs over a whole turn of scorings, one of which has an effective rank.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import tempfile
from pathlib import Path

import torch

from benchmarks.training_step import architecture, read, this_project

SCORINGS = 4


def development_set(texts: list[str], pairs: int) -> Path:
    """A folder with `stsb_dev.tsv`: pairs of distinct sentences of 5 to 15 words."""
    folder, draw = Path(tempfile.mkdtemp()), random.Random(0)
    short = list(dict.fromkeys(" ".join(t.split()[: draw.randint(5, 15)]) for t in texts))[: 2 * pairs]
    rows = ["score\tsentence1\tsentence2"]
    rows += [
        f"{draw.uniform(0, 5):.2f}\t{a}\t{b}".replace('"', "")
        for a, b in zip(short[::2], short[1::2], strict=False)
    ]
    (folder / "stsb_dev.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return folder


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backbone", type=Path, required=True, help="folder whose tokenizer is used")
    parser.add_argument("--sentences", type=Path, required=True)
    parser.add_argument("--sts", type=Path, help="folder with stsb_dev.tsv")
    parser.add_argument("--pairs", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--every", type=int, default=125)
    parser.add_argument("--step", default="graph" if torch.cuda.is_available() else "eager")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    every = options.every
    steps = (1 + SCORINGS) * every + 1
    folder = architecture(options.backbone, options.layers)
    texts = read(options.sentences, max(4 * options.pairs, options.batch * every))
    # The same batches again and again: each shape has its graph when the clock starts.
    trained = texts[: options.batch * every]
    sts = options.sts or development_set(texts, options.pairs)
    scored = (f"evaluation.sts_dir={sts}", f"evaluation.every={every}")
    fixed = ("data.shuffle=false",)
    seconds = {
        name: this_project(folder, trained, options.batch, steps, options.step, (*fixed, *more), warm=every)[
            0
        ]
        for name, more in (("without", ()), ("with", scored))
    }
    plain, whole = seconds["without"], seconds["with"]
    found = {
        "step_ms": 1e3 * plain,
        "scoring_ms": 1e3 * (whole - plain) * (steps - every) / SCORINGS,
        "share": 1 - plain / whole,
    }
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    print(f"{device}, torch {torch.__version__}, batch {options.batch}, {options.layers} layers, "
          f"step={options.step}, scoring every {every} steps, {SCORINGS} scorings")  # fmt: skip
    print(f"a step {found['step_ms']:.2f} ms, a scoring {found['scoring_ms']:.1f} ms, "
          f"{100 * found['share']:.2f} % of the time")  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps({"device": device, **found}, indent=2))
    return found


if __name__ == "__main__":
    main()
