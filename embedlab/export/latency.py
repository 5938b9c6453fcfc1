"""How long an encoder takes, text to vector, in each format that it can be shipped in."""

from __future__ import annotations

import os
import platform
import random
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from embedlab.console import table
from embedlab.encoders.loading import load
from embedlab.export.onnx import export_onnx, load_onnx, quantize_onnx
from embedlab.export.roundtrip import SENTENCES, least_cosine
from embedlab.files import scratch_folder

if TYPE_CHECKING:
    from rich.table import Table

    from embedlab.encoders.base import Encoder

FORMATS = ("torch", "onnx", "onnx-int8")
_WARM = 3  # calls before the first that counts
_LETTERS = "abcdefghijklmnopqrstuvwxyz"  # a token each, in nearly every vocabulary


@dataclass(frozen=True)
class Latency:
    """One cell of the table; times in milliseconds a call, end to end.

    Attributes:
        format: torch, onnx or onnx-int8.
        device: that computes.
        threads: of a call.
        batch_size: texts of a call.
        length: tokens of a text that were asked for.
        tokens: and how many they have on average, after the encoder's limit.
        p50, p95, p99: of the calls.
        texts_per_second: by the mean call.
        memory_mb: MiB; of a card the peak of what torch held, else what loading and encoding add to the process's peak.
        cosine: least one with the fp32 vectors on 32 sentences.
    """

    format: str
    device: str
    threads: int
    batch_size: int
    length: int
    tokens: float
    p50: float
    p95: float
    p99: float
    texts_per_second: float
    memory_mb: float
    cosine: float


def hardware() -> dict[str, Any]:
    """What the times depend on."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [
            line for line in info.read_text(encoding="utf-8").splitlines() if line.startswith("model name")
        ]
        model = names[0].partition(":")[2].strip() if names else model
    found = {"cpu": model, "cores": os.cpu_count(), "system": platform.platform(), "torch": torch.__version__}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def texts_of(encoder: Encoder, length: int, n: int, seed: int) -> list[str]:
    """Distinct texts of about `length` tokens, the encoder's own ones included; repeats would be encoded once."""
    draw = random.Random(seed)
    texts: dict[str, None] = {}
    while len(texts) < n:
        letters = draw.choices(_LETTERS, k=length)
        while len(letters) > 1 and _tokens(encoder, [" ".join(letters)]) > length:
            letters.pop()
        texts[" ".join(letters)] = None
    return list(texts)


def _tokens(encoder: Encoder, texts: Sequence[str]) -> float:
    return sum(map(len, encoder.tokenization.ids(list(texts)))) / len(texts)


@dataclass(frozen=True)
class Job:
    """What one process measures: a format from a folder, with so many threads, on batches of texts."""

    format: str
    folder: Path
    threads: int
    device: str
    batches: Mapping[tuple[int, int], list[list[str]]]
    """(batch size, length) -> batches."""


def measure(
    encoder: Encoder,
    formats: Sequence[str],
    batch_sizes: Sequence[int],
    lengths: Sequence[int],
    threads: Sequence[int],
    calls: int,
    device: str,
) -> Iterator[Latency]:
    """A row for each format, number of threads, batch size and length; graphs run on the CPU.

    Every format with every number of threads has a process of its own, so that its memory is its own.

    Args:
        encoder: in fp32, on the CPU.
        formats: torch, onnx or onnx-int8.
        batch_sizes: texts of a call.
        lengths: tokens of a text.
        threads: of the CPU.
        calls: that count, of each row.
        device: of the format ``torch``.
    """
    batches = {
        (size, length): [texts_of(encoder, length, size, seed) for seed in range(_WARM + calls)]
        for size in batch_sizes
        for length in lengths
    }
    for form in formats:
        with scratch_folder() as folder:
            _write(encoder, form, folder / "encoder")
            where = device if form == "torch" else "cpu"
            for some in threads:
                job = Job(form, folder / "encoder", some, where, batches)
                with ProcessPoolExecutor(1, get_context("spawn")) as process:
                    times, memory, vectors = process.submit(_run, job).result()
                cosine = round(least_cosine(encoder, lambda _: vectors), 6)  # noqa: B023
                for (size, length), found in times.items():
                    p50, p95, p99 = (round(1e3 * float(q), 3) for q in np.quantile(found, (0.5, 0.95, 0.99)))
                    tokens = round(_tokens(encoder, batches[size, length][-1]), 1)
                    per_second = round(size / float(np.mean(found)), 1)
                    yield Latency(
                        form,
                        where,
                        some,
                        size,
                        length,
                        tokens,
                        p50,
                        p95,
                        p99,
                        per_second,
                        round(memory, 1),
                        cosine,
                    )


def _write(encoder: Encoder, form: str, folder: Path) -> None:
    if form == "torch":
        encoder.save(folder)
        return
    folder.mkdir()
    export_onnx(encoder.merged(), folder, normalize=False)
    if form == "onnx-int8":
        quantize_onnx(folder)


def _run(job: Job) -> tuple[dict[tuple[int, int], list[float]], float, Any]:
    """Seconds of the calls that count, MiB, and the vectors of `SENTENCES`."""
    torch.set_num_threads(job.threads)
    before = _peak()
    encode: Callable[[Sequence[str]], Any]
    if job.format == "torch":
        encoder = load(job.folder).to(job.device)
        encode = encoder.encode
    else:
        encode = load_onnx(job.folder, batch_size=1 << 16, threads=job.threads)
    times = {key: [_seconds(encode, batch) for batch in some][_WARM:] for key, some in job.batches.items()}
    cuda = job.device.startswith("cuda")
    memory = torch.cuda.max_memory_allocated() / 2**20 if cuda else _peak() - before
    return times, memory, encode(list(SENTENCES))


def _seconds(encode: Callable[[Sequence[str]], Any], texts: Sequence[str]) -> float:
    start = time.perf_counter()
    encode(texts)
    return time.perf_counter() - start


def _peak() -> float:
    """MiB of memory that this process has held at most."""
    status = Path("/proc/self/status")
    if status.is_file():  # elsewhere: getrusage, which on Linux counts what the parent had before
        (line,) = (x for x in status.read_text(encoding="utf-8").splitlines() if x.startswith("VmHWM:"))
        return int(line.split()[1]) / 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def latency_table(rows: Sequence[Latency]) -> Table:
    """One row a measurement."""
    heads = (
        "format",
        "device",
        "threads",
        "batch",
        "tokens",
        "p50 ms",
        "p95 ms",
        "p99 ms",
        "texts/s",
        "MiB",
        "cosine",
    )
    cells = [
        (r.format, r.device, str(r.threads), str(r.batch_size), f"{r.tokens:g}", f"{r.p50:.2f}", f"{r.p95:.2f}",
         f"{r.p99:.2f}", f"{r.texts_per_second:,.0f}", f"{r.memory_mb:,.0f}", f"{r.cosine:.4f}")
        for r in rows
    ]  # fmt: skip
    return table(heads, cells, left=2)


def record(rows: Sequence[Latency], encoder: Encoder, ckpt: str, calls: int) -> dict[str, Any]:
    """The file's content."""
    return {
        "ckpt": encoder.card.get("hub", ckpt), "fingerprint": encoder.fingerprint(), "calls": calls,
        "hardware": hardware(), "rows": [asdict(row) for row in rows],
    }  # fmt: skip
