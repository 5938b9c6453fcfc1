"""Peak memory of `embedlab encode` with `mini`: it must not grow with the number of lines or with their length.

    python benchmarks/encode_memory.py [--short 1000000] [--long 3000] [--real 2000] [--real-long 40] [--json OUT]

Files of English words are encoded on the CPU, each in a process of its own, whose peak resident memory counts:
`--short` lines of 6 to 14 words (once more in .xz) and `--long` lines of 30 kB without the forward passes, which would
take an hour on two cores: vectors are zeros, and everything else (reading, tokenising, windows, writing) is as it is.
Then `--real` short and `--real-long` long lines with them.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LIMIT = 1 << 30
WORDS = """
    the of and to in a is that for it was on are as with his they at be this from have or by one had not but what
    all were when we there can an your which their said if do will each about how up out them then she many some
    house river mountain quickly gravity engine window history language sentence vector market doctor forest
""".split()  # noqa: SIM905


def lines(n: int, n_chars: int | None, seed: int = 0) -> Iterator[str]:
    """Lines of words; `n_chars` long, or of 6 to 14 words and a number that makes each line another one."""
    rng = random.Random(seed)
    for i in range(n):
        if n_chars is None:
            yield f"{' '.join(rng.choices(WORDS, k=rng.randint(6, 14)))} {i}\n"
        else:
            yield " ".join(rng.choices(WORDS, k=n_chars // 4))[: n_chars - 1] + "\n"


def write(path: Path, n: int, n_chars: int | None) -> Path:
    with (
        lzma.open(path, "wt", preset=0) if path.suffix == ".xz" else path.open("w", encoding="utf-8") as file
    ):
        file.writelines(lines(n, n_chars))
    return path


def child(source: str, out: str, forward: str) -> int:
    """The command, in this process."""
    import torch

    from embedlab.cli.main import main as embedlab
    from embedlab.encoders.encoder import SentenceEncoder

    def zeros(self: SentenceEncoder, input_ids: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.zeros(len(input_ids), self.dim)

    if forward == "none":
        SentenceEncoder.forward = zeros  # type: ignore[method-assign, assignment]
    return embedlab(["encode", source, out, "ckpt=mini", "device=cpu"])


def measure(source: Path, out: Path, forward: str) -> dict[str, Any]:
    """Seconds and peak memory of one command."""
    began = time.perf_counter()
    command = [sys.executable, __file__, "--child", str(source), str(out), forward]
    process = subprocess.Popen(command)
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        raise SystemExit(f"{source}: the command failed")
    return {
        "forward": forward,
        "file_bytes": source.stat().st_size,
        "seconds": round(time.perf_counter() - began, 1),
        "peak_bytes": usage.ru_maxrss * 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", type=int, default=1_000_000)
    parser.add_argument("--long", type=int, default=3000)
    parser.add_argument("--real", type=int, default=2000)
    parser.add_argument("--real-long", type=int, default=40)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        raise SystemExit(child(*options.child))
    cases = {
        "short": ("a.txt", options.short, None, "none"),
        "short_xz": ("a.txt.xz", options.short, None, "none"),
        "long": ("a.txt", options.long, 30_000, "none"),
        "short_real": ("a.txt", options.real, None, "real"),
        "long_real": ("a.txt", options.real_long, 30_000, "real"),
    }
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (file, n, n_chars, forward) in cases.items():
            source = write(Path(folder) / file, n, n_chars)
            found[name] = {"lines": n, **measure(source, Path(folder) / "out.npy", forward)}
            source.unlink()
            print(f"{name:9} {n:9,} lines {found[name]['seconds']:8.1f} s", end="")
            print(f"  peak {found[name]['peak_bytes'] / (1 << 20):6.0f} MiB (forward {forward})")
    if options.json:
        import torch

        facts = {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "torch": torch.__version__,
            "date": time.strftime("%Y-%m-%d"),
            "limit_bytes": LIMIT,
        }
        options.json.write_text(json.dumps({**facts, **found}, indent=2) + "\n", encoding="utf-8")
    if any(case["peak_bytes"] >= LIMIT for case in found.values()):
        raise SystemExit("over 1 GiB")


if __name__ == "__main__":
    main()
