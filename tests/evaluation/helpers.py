"""A cheap, deterministic encoder and a small STS folder, in the layout of the real one."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np


class HashedWords:
    """Sum of fixed random word vectors: similar sentences are close. Counts what it was asked to encode."""

    def __init__(self, dim: int = 64) -> None:
        self.dim = dim
        self.calls: list[list[str]] = []

    def encode(self, sentences: Sequence[str]) -> np.ndarray:
        self.calls.append(list(sentences))
        return np.stack([self._vector(s) for s in sentences])

    def _vector(self, sentence: str) -> np.ndarray:
        total = np.zeros(self.dim, dtype=np.float32)
        for word in re.findall(r"\w+", sentence.lower()):
            generator = np.random.default_rng(zlib.crc32(word.encode()))
            total += generator.standard_normal(self.dim).astype(np.float32)
        return total


class Constant:
    """A collapsed encoder."""

    def encode(self, sentences: Sequence[str]) -> np.ndarray:
        return np.ones((len(sentences), 8), dtype=np.float32)


class Lookup:
    """An encoder given by a table, two numbers a sentence."""

    def __init__(self, table: dict[str, tuple[float, float]]) -> None:
        self.table = table

    def encode(self, sentences: Sequence[str]) -> np.ndarray:
        return np.array([self.table[s] for s in sentences], dtype=np.float32)


WORDS = [
    "cat",
    "dog",
    "bird",
    "sat",
    "ran",
    "flew",
    "on",
    "under",
    "over",
    "mat",
    "tree",
    "house",
    "red",
    "blue",
    "old",
    "young",
    "quickly",
    "slowly",
]


def write_tsv(path: Path, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    lines = ["\t".join(header), *("\t".join(map(str, row)) for row in rows)]
    data = ("\n".join(lines) + "\n").encode("utf-8")
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def write_sts_folder(folder: Path, pairs: int = 40, tok: bool = True) -> Path:
    """A folder with all nine files, `pairs` pairs each, of which the last has no rating."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)

    def pair() -> tuple[str, str, float]:
        first = list(generator.choice(WORDS, size=7))
        second = list(first)
        changed = int(generator.integers(0, 8))
        for position in generator.choice(7, size=changed, replace=False):
            second[position] = str(generator.choice(WORDS))
        rating = round(5 * (1 - changed / 7) + float(generator.normal(0, 0.3)), 1)
        return (
            " ".join(first).capitalize() + ".",
            " ".join(second).capitalize() + ".",
            min(5.0, max(0.0, rating)),
        )

    def tokens(sentence: str) -> str:
        return sentence.lower().replace(".", "  .")

    names = ["sts12_test", "sts13_test", "sts14_test", "sts15_test", "sts16_test"]
    names += ["stsb_train", "stsb_dev", "stsb_test"]
    extra = ["sentence1_tok", "sentence2_tok"] if tok else []
    for name in names:
        rows: list[list[object]] = []
        for i in range(pairs):
            first, second, rating = pair()
            subset = "one" if i < pairs // 4 else "two"
            row: list[object] = [subset, i, "" if i == pairs - 1 else rating, first, second]
            rows.append(row + ([tokens(first), tokens(second)] if tok else []))
        write_tsv(
            folder / f"{name}.tsv.gz", ["subset", "idx", "score", "sentence1", "sentence2", *extra], rows
        )
    sick = [
        (i, max(1.0, rating), "NEUTRAL", first, second)
        for i in range(pairs)
        for first, second, rating in [pair()]
    ]
    write_tsv(
        folder / "sick_test.tsv.gz", ["pair_id", "relatedness", "entailment", "sentence1", "sentence2"], sick
    )
    return folder
