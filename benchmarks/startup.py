"""Start-up: `embedlab --help`, and `embedlab train` to its first step on the CPU, each in fresh processes.

    python benchmarks/startup.py [--rounds 3] [--json OUT]

The first step is that of ``method=simcse backbone=mini trainer=cpu`` with ``trainer.max_steps=1`` on a small file, its
token cache empty; seconds are those of the whole command, by the clock and of computing (user + sys), which a busy
machine changes less. Needs the installed `embedlab` command.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HELP = ["--help"]
TRAIN = [
    "train", "backbone=mini", "method=simcse", "pooling=mean", "trainer=cpu", "trainer.max_steps=1",
    "data.batch_size=16", "evaluation.final=[]", "evaluation.before=false", "callbacks.progress=none",
    "callbacks.checkpoint.at_end=false",
]  # fmt: skip


def spent_by_children() -> float:
    """Seconds of computing of processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp())
    (work / "text.txt").write_text(
        "\n".join(f"Sentence number {i} of a small file." for i in range(64)), encoding="utf-8"
    )
    seconds: dict[str, list[float]] = {"--help": [], "train": []}
    computing: dict[str, list[float]] = {name: [] for name in seconds}
    for i in range(options.rounds):
        environment = {**os.environ, "EMBEDLAB_CACHE": str(work / f"cache{i}")}
        more = [f"data.files={work / 'text.txt'}", f"hydra.run.dir={work / str(i)}"]
        for name, arguments in (("--help", HELP), ("train", TRAIN + more)):
            began, before = time.perf_counter(), spent_by_children()
            subprocess.run(
                [sys.executable, "-m", "embedlab", *arguments],
                check=True,
                env=environment,
                capture_output=True,
            )
            seconds[name].append(time.perf_counter() - began)
            computing[name].append(spent_by_children() - before)
    for name, spent in seconds.items():
        print(
            f"embedlab {name:8} {statistics.median(spent):6.2f} s (of {', '.join(f'{s:.2f}' for s in spent)}), "
            f"{statistics.median(computing[name]):.2f} s of computing"
        )
    if options.json:
        options.json.write_text(
            json.dumps(
                {"seconds": seconds, "computing": computing, "date": time.strftime("%Y-%m-%d")}, indent=2
            )
        )


if __name__ == "__main__":
    main()
