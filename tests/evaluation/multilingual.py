"""Small translation files in the layout of the real ones, and encoders whose scores on them are known."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.evaluation.helpers import write_tsv

LANGUAGES = ("eng", "deu", "fra")


def sentence(language: str, row: int) -> str:
    return f"{language} says number {row}"


class Interlingua:
    """Vectors that depend on the row of a sentence (its meaning) and, by `clusters`, on its language."""

    def __init__(self, clusters: float = 0.0, meaning: float = 1.0, dim: int = 24) -> None:
        self.clusters, self.meaning, self.dim = clusters, meaning, dim

    def encode(self, sentences: Sequence[str]) -> np.ndarray:
        return np.stack([self._vector(text) for text in sentences]).astype(np.float32)

    def _vector(self, text: str) -> np.ndarray:
        language, number = text.split()[0], re.findall(r"\d+", text)[-1]
        return self.meaning * self._draw(f"row {number}") + self.clusters * self._draw(f"language {language}")

    def _draw(self, name: str) -> np.ndarray:
        return np.random.default_rng(zlib.crc32(name.encode())).standard_normal(self.dim)


def write_parallel(folder: Path, rows: int = 40) -> Path:
    """parallel/ with a NTREX table of three languages and Tatoeba pairs of German, French and Low German."""
    (folder / "tatoeba_test").mkdir(parents=True)
    table = [[sentence(language, i) for language in LANGUAGES] for i in range(rows)]
    write_tsv(folder / "ntrex_newstest2019.tsv.gz", LANGUAGES, table)
    for language in ("deu", "fra", "nds"):
        pairs = [[sentence(language, i), sentence("eng", i)] for i in range(rows // 2)]
        write_tsv(folder / "tatoeba_test" / f"tatoeba_{language}-eng.tsv.gz", [language, "eng"], pairs)
    return folder


def write_xquad(folder: Path, passages: int = 6, each: int = 2) -> Path:
    """xquad/ in English and German: question i of passage p asks for the word that only p has."""
    inner = folder / "xquad"
    inner.mkdir(parents=True)
    for language in ("en", "de"):
        texts = [
            (p, "t", f"{language} tells that place{p} has towers and rivers {p}") for p in range(passages)
        ]
        write_tsv(inner / f"xquad_{language}_passages.tsv.gz", ["pid", "title", "passage"], texts)
        questions = [
            (f"q{p}-{i}", p, f"{language} asks {i} which place {p}", f"place{p}")
            for p in range(passages)
            for i in range(each)
        ]
        header = ["qid", "pid", "question", "answer"]
        write_tsv(inner / f"xquad_{language}_questions.tsv.gz", header, questions)
    return folder
