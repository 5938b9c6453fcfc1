"""Encoding texts: this project's `encode`, packed and padded, against sentence-transformers' with the same weights.

    python -m benchmarks.encode [--backbone FOLDER] [--sentences FILE] [--before CHECKOUT] [--json OUT] [--profile]

Without a folder the model is random, of DistilBERT's shape, with the packaged tokenizer; without a file texts are
drawn from its vocabulary: short ones (10 to 15 tokens), sentences (20 to 40) and paragraphs (128 to 256). All arms get
the same list of raw strings and tokenise, encode and return numpy rows; they take turns, and the median counts.

    before                 an older checkout, in a process of its own (``--before FOLDER``)
    sentence-transformers  the dtype in its weights, `sdpa`, the fastest of several batch sizes; it sorts by length too
    padded                 this project without its packed kernels (``EMBEDLAB_KERNELS=fused_block=0``)
    packed                 this project; "tokenising" (by one thread) and "forward" are parts of it by themselves

The least cosine between arms shows that the same work is done.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.fit import paths_of
from benchmarks.training_step import read, sync
from embedlab.kernels.available import SWITCHES

Arms = dict[str, Callable[[], Any]]
KINDS = {"short": (20_000, 8, 13), "sentences": (20_000, 18, 38), "paragraphs": (4_000, 126, 254)}
"""Texts, and the fewest and most words of each: a word is about a token, and there are two special ones."""
BATCHES = (128, 512, 2048)
THREADS = ("OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM")
"""Variables that take threads away, told where they are set."""


def model_folder(layers: int, width: int) -> Path:
    """DistilBERT's shape with random weights and the packaged tokenizer."""
    from transformers import DistilBertConfig, DistilBertModel

    import embedlab

    out = Path(tempfile.mkdtemp())
    torch.manual_seed(0)
    config = DistilBertConfig(n_layers=layers, dim=width, hidden_dim=4 * width, n_heads=max(1, width // 64))
    DistilBertModel(config).save_pretrained(out)
    embedlab.load("mini").tokenizer.save_pretrained(out)
    return out


def drawn(tokenizer: Any, n: int, fewest: int, most: int) -> list[str]:
    """Texts of whole words of the vocabulary, frequent ones (they come first) more often."""
    words = [w for w in sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get) if w.isalpha()]
    draw = random.Random(0)
    weights = [1 / (10 + i) for i in range(len(words))]
    return [" ".join(draw.choices(words, weights, k=draw.randint(fewest, most))) for _ in range(n)]


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    sync()
    began = time.perf_counter()
    result = call()
    sync()
    return time.perf_counter() - began, result


def rounds(arms: Arms, n: int) -> dict[str, list[float]]:
    """Seconds of each arm, in turn; the first turn, in which kernels are compiled, does not count."""
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    for turn in range(n + 1):
        for arm, call in arms.items():
            spent, _ = timed(call)
            if turn:
                seconds[arm].append(spent)
    return seconds


def least_cosine(first: np.ndarray, second: np.ndarray) -> float:
    a, b = (np.asarray(x, np.float64) for x in (first, second))
    return float(((a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)).min())


def padded(call: Callable[[], Any]) -> Any:
    """A call without the packed kernels."""
    before = os.environ.get(SWITCHES)
    os.environ[SWITCHES] = "fused_block=0"
    try:
        return call()
    finally:
        del os.environ[SWITCHES]
        if before is not None:
            os.environ[SWITCHES] = before


_CHILD = """
import json, sys
import embedlab
folder, device, dtype = sys.argv[1:]
encoder = embedlab.load(folder).to(device)
for line in sys.stdin:
    if line.strip():
        texts = json.loads(line)
    else:
        encoder.encode(texts, dtype=dtype)
    print("done", flush=True)
"""


class Older:
    """`encode` of another checkout of this project, in a process that goes on from call to call."""

    def __init__(self, checkout: Path, folder: Path, device: str, dtype: str) -> None:
        command = [sys.executable, "-c", _CHILD, str(folder), device, dtype]
        environment = {**os.environ, "PYTHONPATH": paths_of(checkout)}
        self._process = subprocess.Popen(
            command, cwd=checkout, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def read(self, texts: list[str]) -> None:
        """What `encode` gets from now on."""
        self._ask(json.dumps(texts))

    def encode(self) -> None:
        self._ask("")

    def _ask(self, line: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        if self._process.stdout.readline() != "done\n":
            raise SystemExit(f"the older checkout ended with status {self._process.wait()}")

    def close(self) -> None:
        self._process.communicate()


class Peers:
    """The same model here, in sentence-transformers and in an older checkout, on the device and in `dtype`."""

    def __init__(self, folder: Path, dtype: str, device: str, before: Path | None) -> None:
        from sentence_transformers import SentenceTransformer, models

        import embedlab

        self.ours = embedlab.load(str(folder)).to(device)
        transformer = models.Transformer(str(folder), max_seq_length=self.ours.tokenization.row_limit)
        pooling = models.Pooling(self.ours.dim, pooling_mode="mean")
        self.theirs = SentenceTransformer(modules=[transformer, pooling], device=device)
        self.theirs.to(getattr(torch, dtype))
        self.dtype = dtype
        self.older = None if before is None else Older(before, folder, device, dtype)

    def own(self, texts: list[str]) -> np.ndarray:
        found: np.ndarray = self.ours.encode(texts, dtype=self.dtype)
        return found

    def peer(self, texts: list[str], batch: int) -> np.ndarray:
        found: np.ndarray = self.theirs.encode(
            texts, batch_size=batch, convert_to_numpy=True, show_progress_bar=False
        )
        return found

    def arms(self, texts: list[str]) -> tuple[Arms, int]:
        """The arms, and sentence-transformers' best batch size."""
        some = texts[: max(len(texts) // 4, 1)]
        self.peer(some, BATCHES[0])
        best = min(BATCHES, key=lambda batch: timed(lambda: self.peer(some, batch))[0])
        ours, rows = self.ours, self.ours.tokenization.ids(texts)
        before: Arms = {}
        if self.older is not None:
            self.older.read(texts)
            before["before"] = self.older.encode
        return {
            "sentence-transformers": lambda: self.peer(texts, best),
            **before,
            "padded": lambda: padded(lambda: self.own(texts)),
            "packed": lambda: self.own(texts),
            "tokenising": lambda: list(ours.tokenization.tokenised(texts)),
            "forward": lambda: ours.encode_ids(rows, dtype=self.dtype, to_host=True),
        }, best


def measure(peers: Peers, texts: list[str], n: int) -> dict[str, Any]:
    """Texts a second of each arm, and how near their vectors are."""
    arms, batch = peers.arms(texts)
    seconds = rounds(arms, n)
    rates = {arm: len(texts) / statistics.median(all_) for arm, all_ in seconds.items()}
    some = texts[:2000]
    packed, plain = peers.own(some), padded(lambda: peers.own(some))
    tokens = peers.ours.tokenization.ids(texts)
    return {
        "n": len(texts),
        "tokens": sum(map(len, tokens)) / len(tokens),
        "texts_per_second": rates,
        "ratio_before": rates["packed"] / rates["before"] if "before" in rates else None,
        "ratio_padded": rates["packed"] / rates["padded"],
        "ratio_sentence_transformers": rates["packed"] / rates["sentence-transformers"],
        "sentence_transformers_batch": batch,
        "least_cosine_padded": least_cosine(packed, plain),
        "least_cosine_sentence_transformers": least_cosine(packed, peers.peer(some, batch)),
        "one_text_ms": {
            name: 1e3 * statistics.median(rounds({name: call}, 20)[name])
            for name, call in (
                ("packed", lambda: peers.own(texts[:1])),
                ("padded", lambda: padded(lambda: peers.own(texts[:1]))),
            )
        },
        "seconds": seconds,
    }


def profile(call: Callable[[], Any]) -> str:
    """Where the card's and the host's time goes."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    with torch_profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        timed(call)
    averages = found.key_averages()
    return "\n".join(
        averages.table(sort_by=key, row_limit=16, max_name_column_width=48)
        for key in ("self_cuda_time_total", "self_cpu_time_total")
    )


def report(kind: str, found: dict[str, Any]) -> None:
    print(f"{kind}: {found['n']:,} texts of {found['tokens']:.0f} tokens")
    for arm, rate in found["texts_per_second"].items():
        spent = ", ".join(f"{s:.3f}" for s in found["seconds"][arm])
        print(f"  {arm:22} {rate:9,.0f} texts/s  ({spent} s)")
    if found["ratio_before"] is not None:
        print(f"  packed / before {found['ratio_before']:.2f}x")
    print(
        f"  packed / padded {found['ratio_padded']:.2f}x, packed / sentence-transformers (batches of "
        f"{found['sentence_transformers_batch']}) {found['ratio_sentence_transformers']:.2f}x; least cosine "
        f"{found['least_cosine_padded']:.6f} and {found['least_cosine_sentence_transformers']:.6f}; one text "
        f"{found['one_text_ms']['packed']:.1f} ms packed, {found['one_text_ms']['padded']:.1f} padded",
        flush=True,
    )


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backbone", type=Path, help="a Hugging Face encoder, read by its mean")
    parser.add_argument("--sentences", type=Path, help="texts, one a line, instead of those that are drawn")
    parser.add_argument("--n", type=int, help="texts of each kind")
    parser.add_argument("--before", type=Path, help="an older checkout of this project, to compare with")
    parser.add_argument("--rounds", type=int, default=3)
    cuda = torch.cuda.is_available()
    parser.add_argument("--dtype", default="bfloat16" if cuda else "float32")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--profile", action="store_true", help="where the time of packed goes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    folder = options.backbone or model_folder(options.layers, options.width)
    peers = Peers(folder, options.dtype, "cuda" if cuda else "cpu", options.before)
    name = torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine()
    facts = {
        "device": name,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "dtype": options.dtype,
        "set": {name: os.environ[name] for name in THREADS if name in os.environ},
        "date": time.strftime("%Y-%m-%d"),
    }
    print(", ".join(str(value) for value in facts.values()), flush=True)
    tokenizer = peers.ours.tokenizer
    if options.sentences:
        texts = {"file": read(options.sentences, options.n or 20_000)}
    else:
        texts = {kind: drawn(tokenizer, options.n or n, *words) for kind, (n, *words) in KINDS.items()}
    found: dict[str, Any] = {}
    for kind, some in texts.items():
        found[kind] = measure(peers, some, options.rounds)
        report(kind, found[kind])
        if options.json:
            options.json.write_text(json.dumps({**facts, **found}, indent=2), encoding="utf-8")
    if peers.older is not None:
        peers.older.close()
    if options.profile:
        for kind, some in texts.items():
            print(f"{kind}\n{profile(partial(peers.own, some))}")
    return found


if __name__ == "__main__":
    main()
