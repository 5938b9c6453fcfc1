"""An approximate index of many vectors on a small machine: time and memory of building it, recall and time of asking.

    python -m benchmarks.index_scale [--rows 10000000] [--dim 256] [--limit 6] [--threads 2] [--work DIR] [--json OUT]
        [KEY=VALUE ...]

Vectors are synthetic: a mixture of 10,000 centres in 64 directions of falling weight, and white noise, as float16 parts
of a million rows. The index is built by `embedlab search index PARTS INDEX kind=ivf_pq KEY=VALUE ...` and asked by
`embedlab search query`, each in a process of its own, whose anonymous memory (what it holds) and resident memory (with
the pages of mapped files, which the system takes back when it needs them) are looked at ten times a second. Exit status
1 where anonymous memory passed `--limit` GiB.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

PART = 1_000_000
_BLOCK = 100_000
_CENTRES, _DIRECTIONS = 10_000, 64


def write_parts(folder: Path, rows: int, dim: int) -> None:
    """The parts, as `embedlab encode … format=npy store=float16` would leave them."""
    draw = np.random.default_rng(0)
    scale = np.arange(1, _DIRECTIONS + 1, dtype=np.float32) ** -0.5
    centres = draw.standard_normal((_CENTRES, _DIRECTIONS), np.float32) * scale
    turn = np.linalg.qr(draw.standard_normal((dim, _DIRECTIONS)))[0].T.astype(np.float32)
    folder.mkdir(parents=True)
    for number, start in enumerate(range(0, rows, PART)):
        size = min(PART, rows - start)
        part = np.lib.format.open_memmap(
            folder / f"part-{number:06}.npy", mode="w+", dtype=np.float16, shape=(size, dim)
        )
        for at in range(0, size, _BLOCK):
            n = min(_BLOCK, size - at)
            inner = centres[draw.integers(_CENTRES, size=n)]
            inner = inner + 0.7 * scale * draw.standard_normal((n, _DIRECTIONS), np.float32)
            part[at : at + n] = inner @ turn + 0.03 * draw.standard_normal((n, dim), np.float32)
        part.flush()


def watched(command: list[str], threads: int) -> dict[str, Any]:
    """Run a command; its seconds, standard output, and the most GiB of anonymous and of resident memory."""
    # Threads that wait by turning round would take the time of others on a shared machine.
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, stdout=out, env=environment)
        peaks = {"anonymous": 0.0, "resident": 0.0}
        while process.poll() is None:
            try:
                status = Path(f"/proc/{process.pid}/status").read_text()
            except OSError:
                break
            for key, name in (("RssAnon", "anonymous"), ("VmRSS", "resident")):
                if found := re.search(rf"{key}:\s+(\d+) kB", status):
                    peaks[name] = max(peaks[name], int(found[1]) / (1 << 20))
            time.sleep(0.1)
        if process.wait():
            raise SystemExit(f"{' '.join(command)}: status {process.returncode}")
        out.seek(0)
        told = out.read()
    gib = {f"{name}_gib": round(peak, 2) for name, peak in peaks.items()}
    return {"seconds": round(time.monotonic() - start, 1), **gib, "output": told}


def arithmetic(rows: int, dim: int, code: int = 64) -> dict[str, Any]:
    """What the same layout comes to for other sizes, in GB, by `embedlab.corpus.plan`."""
    from embedlab.corpus.plan import plan

    made = plan("ivf_pq", rows, dim, m=code)
    return {
        "rows": rows, "dim": dim, "factory": made.factory, "float16": rows * dim * 2 / 1e9,
        "codes_and_numbers": rows * (code + 8) / 1e9, "training": made.train_rows * dim * 4 / 1e9,
        "building_in_all": made.memory / 1e9,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--limit", type=float, default=6.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.work) as scratch:
        parts, index, queries = (str(Path(scratch, name)) for name in ("parts", "index", "queries.npy"))
        write_parts(Path(parts), options.rows, options.dim)
        np.save(queries, np.load(Path(parts, "part-000000.npy"), mmap_mode="r")[:1000].astype(np.float32))
        command = [sys.executable, "-m", "embedlab", "search"]
        built = watched([*command, "index", parts, index, "kind=ivf_pq", *options.keys], options.threads)
        print(built["output"])
        asked = watched([*command, "query", index, f"queries={queries}", "k=10"], options.threads)
        asked["lines"] = len(asked.pop("output").splitlines())
        lists = json.loads(Path(index, "lists.json").read_text())
        size = sum(path.stat().st_size for path in Path(index).iterdir())
    peak = max(built["anonymous_gib"], asked["anonymous_gib"])
    found = {
        "rows": options.rows, "dim": options.dim, "threads": options.threads, "keys": options.keys,
        "cores": os.cpu_count(), "load": os.getloadavg()[0], "machine": platform.processor() or platform.machine(),
        "build": built, "queries_1000": asked, "index_gb": size / 1e9, "limit_gib": options.limit,
        "within_limit": peak <= options.limit,
        "lists": {key: lists[key] for key in ("factory", "trained_on", "dial", "value", "target_recall", "recall")},
        "arithmetic": [arithmetic(options.rows, options.dim), arithmetic(100_000_000, 768)],
    }  # fmt: skip
    print(json.dumps({key: value for key, value in found.items() if key != "build"}, indent=2))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return int(peak > options.limit)


if __name__ == "__main__":
    sys.exit(main())
