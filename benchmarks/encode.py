"""Encoding sentences: this project's `encode` against sentence-transformers' with the same weights.

    python benchmarks/encode.py --backbone FOLDER --sentences FILE [--n 20000] [--rounds 3] [--json OUT]

FOLDER is a Hugging Face encoder, read by its mean. Both get the same list of raw strings in file order, and
tokenise, encode and return numpy rows; the rounds alternate, and the median counts. On CUDA both run in bf16 too
(sentence-transformers with bf16 weights, here autocast). Largest difference of the unit vectors is printed, so that
the same work is done.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.training_step import read, sync


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    sync()
    began = time.perf_counter()
    result = call()
    sync()
    return time.perf_counter() - began, result


def unit(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x, dtype=np.float32)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backbone", type=Path, required=True)
    parser.add_argument("--sentences", type=Path, required=True)
    parser.add_argument("--n", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    from sentence_transformers import SentenceTransformer, models

    import embedlab

    texts = read(options.sentences, options.n)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ours = embedlab.load(str(options.backbone)).to(device)
    transformer = models.Transformer(str(options.backbone), max_seq_length=ours.tokenization.max_length)
    theirs = SentenceTransformer(
        modules=[transformer, models.Pooling(ours.dim, pooling_mode="mean")], device=device
    )
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    print(f"{name}, torch {torch.__version__}, {torch.get_num_threads()} threads, {len(texts):,} sentences")
    results: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16") if device == "cuda" else ("float32",):
        if dtype == "bfloat16":
            theirs = theirs.to(torch.bfloat16)

        def peer(texts: list[str] = texts, theirs: Any = theirs) -> Any:
            return theirs.encode(texts, convert_to_numpy=True, show_progress_bar=False)

        def own(texts: list[str] = texts, dtype: str = dtype) -> Any:
            return ours.encode(texts, dtype=dtype)

        peer(texts[:512])
        own(texts[:512])
        seconds: dict[str, list[float]] = {"sentence-transformers": [], "embedlab": []}
        for _ in range(options.rounds):
            for arm, call in (("sentence-transformers", peer), ("embedlab", own)):
                spent, vectors = timed(call)
                seconds[arm].append(spent)
                results[f"{arm}/{dtype}/vectors"] = vectors
        apart = np.abs(
            unit(results.pop(f"embedlab/{dtype}/vectors"))
            - unit(results.pop(f"sentence-transformers/{dtype}/vectors"))
        ).max()
        for arm, all_seconds in seconds.items():
            rate = len(texts) / statistics.median(all_seconds)
            results[f"{arm}/{dtype}"] = {"seconds": all_seconds, "sentences_per_second": rate}
            print(f"{dtype:9} {arm:22} {rate:9.0f} sentences/s")
        ratio = statistics.median(seconds["sentence-transformers"]) / statistics.median(seconds["embedlab"])
        results[f"ratio/{dtype}"] = ratio
        print(f"{dtype:9} embedlab / sentence-transformers: {ratio:.2f}x; largest difference {apart:.1e}")
    if options.json:
        facts = {
            "device": name,
            "torch": torch.__version__,
            "n": len(texts),
            "date": time.strftime("%Y-%m-%d"),
        }
        options.json.write_text(json.dumps({**facts, **results}, indent=2))


if __name__ == "__main__":
    main()
