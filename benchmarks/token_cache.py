"""The token cache: seconds to build it for a file of sentences, seconds to open it afterwards, memory.

    python benchmarks/token_cache.py --sentences FILE [--backbone mini] [--copies 1] [--json OUT]

Runs in a fresh process with an empty cache folder. ``--copies 2`` doubles the file (its rows then repeat; nothing in
the build depends on that). The peer is transformers' fast tokenizer over the same lines in batches of 1,000 with
Arrow's writer, as `datasets.map(batched=True)` does it by default (one process).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import tempfile
import time
from pathlib import Path

from benchmarks.training_step import read


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sentences", type=Path, required=True)
    parser.add_argument("--backbone", default="mini", help="mini, or a folder with a tokenizer")
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--peer", action="store_true", help="also datasets.map")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    from transformers import AutoTokenizer

    from embedlab.config.data import DataConfig
    from embedlab.data.build import build_token_table
    from embedlab.encoders.tokenization import Tokenization
    from embedlab.files import assets_dir

    folder = assets_dir() / "mini" if options.backbone == "mini" else Path(options.backbone)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    work = Path(tempfile.mkdtemp())
    rows = read(options.sentences, 1 << 60) * options.copies
    (work / "text.txt").write_text("\n".join(rows), encoding="utf-8")
    n = len(rows)
    del rows
    config = DataConfig(files=str(work / "text.txt"), cache_dir=str(work / "cache"))
    fields = {"sentence": ("sentence", Tokenization(tokenizer, None, config.max_length))}
    before = resource.getrusage(resource.RUSAGE_SELF)
    began = time.perf_counter()
    table = build_token_table(config, fields, progress=False)
    built = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF)
    began = time.perf_counter()
    build_token_table(config, fields, progress=False)
    opened = time.perf_counter() - began
    tokens = int(table.lengths("sentence").sum())
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    facts = {
        "rows": n,
        "tokens": tokens,
        "build_seconds": built,
        "cpu_seconds": cpu,
        "open_seconds": opened,
        "peak_gib": after.ru_maxrss / 2**20,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "machine": platform.processor() or platform.machine(),
        "date": time.strftime("%Y-%m-%d"),
    }
    print(f"{n:,} rows, {tokens:,} tokens on {facts['cores']} cores: built in {built:.1f} s ({cpu:.1f} s of CPU, "
          f"{tokens / built:,.0f} tokens/s), opened in {opened:.3f} s, peak {facts['peak_gib']:.2f} GiB")  # fmt: skip
    if options.peer:
        import datasets

        datasets.disable_progress_bars()
        began = time.perf_counter()
        data = datasets.load_dataset("text", data_files=str(work / "text.txt"), cache_dir=str(work / "hf"))
        data.map(lambda b: tokenizer(b["text"], truncation=True, max_length=32), batched=True)
        facts["datasets_seconds"] = time.perf_counter() - began
        ratio = facts["datasets_seconds"] / built
        print(f"datasets.map: {facts['datasets_seconds']:.1f} s; embedlab is {ratio:.2f}x as fast")
    if options.json:
        options.json.write_text(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
