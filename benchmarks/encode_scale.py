"""The host's side of encoding a corpus into a folder of parts: lines a second, and memory that does not grow.

    python -m benchmarks.encode_scale [--lines 20000000] [--part-rows 100000] [--processes 1] [--minutes 5]
        [--json OUT]

Lines of 6 to 14 words are encoded by `embedlab encode … part_rows=… store=float16 ckpt=mini` without the forward
passes: vectors are drawn, and reading, tokenising, storing, hashing and writing are as they are. Prints what one
process does, and its resident memory as the rows go by. It is stopped after `--minutes`, and says where.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.encode_memory import lines


def child(*command: str) -> int:
    """The command, in this process, with drawn vectors."""
    import torch

    from embedlab.cli.main import main as embedlab
    from embedlab.encoders.encoder import SentenceEncoder

    def noise(self: SentenceEncoder, input_ids: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.randn(len(input_ids), self.dim)

    SentenceEncoder.forward = noise  # type: ignore[method-assign, assignment]
    SentenceEncoder.reader = lambda self, skip: None  # type: ignore[method-assign]
    return embedlab(list(command))


def resident(process: int) -> int:
    """Bytes of memory that a process holds now."""
    text = Path(f"/proc/{process}/statm").read_text()
    return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(folder: Path, n: int, part: int, processes: int, minutes: float) -> dict[str, Any]:
    """Seconds from the first part to the last, and memory by rows written."""
    source, out = folder / "lines.txt", folder / "out"
    with source.open("w", encoding="utf-8") as file:
        file.writelines(lines(n, None))
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.encode_scale", "--child", "encode", str(source), f"{out}/", "ckpt=mini",
             "device=cpu", f"part_rows={part}", "store=float16", "input_hash=stat", f"shard={i}/{processes}"],
            stdout=subprocess.DEVNULL,
        )
        for i in range(processes)
    ]  # fmt: skip
    seen: list[tuple[float, int, int]] = []
    deadline = time.monotonic() + 60 * minutes
    while any(p.poll() is None for p in started) and time.monotonic() < deadline:
        time.sleep(0.05)
        parts = len(list(out.glob("part-*.json"))) if out.is_dir() else 0
        alive = [resident(p.pid) for p in started if p.poll() is None]
        if alive and parts and (not seen or parts > seen[-1][1]):
            seen.append((time.monotonic(), parts, max(alive)))
    for p in started:
        if p.poll() is None:
            p.send_signal(signal.SIGTERM)
    for p in started:
        p.wait()
    (began, first, _), (ended, last, _) = seen[0], seen[-1]
    parts = len(list(out.glob("part-*.json")))
    return {
        "lines": n,
        "processes": processes,
        "lines_encoded": min(n, parts * part),
        "lines_per_second": round((last - first) * part / (ended - began), 1) if last > first else None,
        "output_bytes": sum(p.stat().st_size for p in out.iterdir()),
        "resident_bytes_by_lines": {parts * part: memory for _, parts, memory in seen},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lines", type=int, default=20_000_000)
    parser.add_argument("--part-rows", type=int, default=100_000)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        raise SystemExit(child(*options.child))
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), options.lines, options.part_rows, options.processes, options.minutes)
    found |= {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1), "machine": platform.machine()}
    print(json.dumps(found, indent=2))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
