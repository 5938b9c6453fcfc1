"""Peak memory of commands with `mini`: it must not grow with the number of lines or with their length.

    python benchmarks/encode_memory.py [--short 1000000] [--long 3000] [--real 2000] [--real-long 40] [--others 100000]
        [--only NAMES] [--json OUT]

Files of English words are encoded on the CPU, each in a process of its own, whose peak resident memory counts:
`--short` lines of 6 to 14 words (once more in .xz) and `--long` lines of 30 kB without the forward passes, which would
take an hour on two cores: vectors are zeros, and everything else (reading, tokenising, windows, writing) is as it is.
Then `--real` short and `--real-long` long lines with them; and, without them again, `--others` lines to index and to
search, as pairs to rate (`evaluate suite=sts`), a fifth of them as translations to find (`suite=bitext`), and a report
of a fiftieth as many runs.
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
from collections.abc import Callable, Iterator
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


def child(forward: str, *command: str) -> int:
    """The command, in this process."""
    import torch

    from embedlab.cli.main import main as embedlab
    from embedlab.encoders.encoder import SentenceEncoder

    def noise(self: SentenceEncoder, input_ids: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.randn(len(input_ids), self.dim)

    if forward == "none":
        SentenceEncoder.forward = noise  # type: ignore[method-assign, assignment]
    return embedlab(list(command))


def measure(forward: str, *command: str | Path) -> dict[str, Any]:
    """Seconds and peak memory of one command."""
    began = time.perf_counter()
    line = [sys.executable, __file__, "--child", forward, *map(str, command)]
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        raise SystemExit(f"{' '.join(map(str, command))}: the command failed")
    return {
        "forward": forward,
        "seconds": round(time.perf_counter() - began, 1),
        "peak_bytes": usage.ru_maxrss * 1024,
    }


def encode(folder: Path, name: str, n: int, n_chars: int | None, forward: str) -> dict[str, Any]:
    source = write(folder / name, n, n_chars)
    size = source.stat().st_size
    found = measure(forward, "encode", source, folder / "out.npy", "ckpt=mini", "device=cpu")
    source.unlink()
    return {"lines": n, "file_bytes": size, **found}


def index(folder: Path, n: int) -> dict[str, Any]:
    source = write(folder / "a.txt", n, None)
    return {
        "lines": n,
        **measure("none", "search", "index", source, folder / "index", "ckpt=mini", "device=cpu"),
    }


def search(folder: Path, n: int) -> dict[str, Any]:
    index(folder / "for-search", n)
    return {"lines": n, **measure("none", "search", "query", folder / "for-search" / "index", "a river")}


def evaluate(folder: Path, n: int) -> dict[str, Any]:
    texts = [line.strip() for line in lines(2 * n, None)]
    rows = [f"{i % 6}\t{a}\t{b}" for i, (a, b) in enumerate(zip(texts[::2], texts[1::2], strict=True))]
    (folder / "own.tsv").write_text(
        "\n".join(["score\tsentence1\tsentence2", *rows]) + "\n", encoding="utf-8"
    )
    tasks = f"tasks=[{folder / 'own.tsv'}]"
    return {
        "pairs": n,
        **measure("none", "evaluate", "ckpt=mini", "suite=sts", tasks, f"out={folder / 'o.json'}"),
    }


def mining(folder: Path, n: int) -> dict[str, Any]:
    texts = [line.strip() for line in lines(2 * n, None)]
    rows = [f"{a}\t{b}" for a, b in zip(texts[::2], texts[1::2], strict=True)]
    (folder / "ntrex_newstest2019.tsv").write_text("\n".join(["eng\tdeu", *rows]) + "\n", encoding="utf-8")
    told = ["tasks=ntrex", f"data_dir={folder}", f"out={folder / 'o.json'}"]
    return {"pairs": n, **measure("none", "evaluate", "ckpt=mini", "suite=bitext", *told)}


def report(folder: Path, n: int) -> dict[str, Any]:
    for i in range(n):
        config = {"seed": i % 5, "method": {"name": "simcse"}, "pooling": {"name": "last_n", "n": i // 5}}
        scores = {f"{task}/spearman": 60.0 + i % 7 for task in ("sts7", "stsb", "sickr")}
        run = {"scores": scores, "config": config, "training": {"seed": i % 5, "device": "cpu", "steps": 3}}
        (folder / f"{i}").mkdir()
        (folder / f"{i}" / "scores.json").write_text(json.dumps(run), encoding="utf-8")
    return {"runs": n, **measure("none", "report", folder, "--out", folder / "report")}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", type=int, default=1_000_000)
    parser.add_argument("--long", type=int, default=3000)
    parser.add_argument("--real", type=int, default=2000)
    parser.add_argument("--real-long", type=int, default=40)
    parser.add_argument("--others", type=int, default=100_000)
    parser.add_argument("--only", default="", help="cases by name, parted by commas")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        raise SystemExit(child(*options.child))
    cases: dict[str, Callable[[Path], dict[str, Any]]] = {
        "short": lambda at: encode(at, "a.txt", options.short, None, "none"),
        "short_xz": lambda at: encode(at, "a.txt.xz", options.short, None, "none"),
        "long": lambda at: encode(at, "a.txt", options.long, 30_000, "none"),
        "short_real": lambda at: encode(at, "a.txt", options.real, None, "real"),
        "long_real": lambda at: encode(at, "a.txt", options.real_long, 30_000, "real"),
        "index": lambda at: index(at, options.others),
        "search": lambda at: search(at, options.others),
        "evaluate": lambda at: evaluate(at, options.others),
        "mining": lambda at: mining(at, options.others // 5),
        "report": lambda at: report(at, options.others // 50),
    }
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only.split(",") if options.only else cases:
            place = Path(folder, name)
            (place / "for-search").mkdir(parents=True)
            found[name] = cases[name](place)
            peak = found[name]["peak_bytes"] / (1 << 20)
            size = next(value for value in found[name].values() if isinstance(value, int))
            print(f"{name:10} {size:9,} {found[name]['seconds']:8.1f} s  peak {peak:6.0f} MiB", flush=True)
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
