"""Transfer accuracy by SentEval's classifier against scikit-learn's logistic regression, on the same vectors.

    python benchmarks/transfer_agreement.py ../shared/data/transfer [--tasks cr,subj] [--dim 128] [--scale 1]

The vectors are a bag of words under a random projection: each word's entries are N(0, 1 / dim), which keeps
lengths (Johnson & Lindenstrauss), and a sentence is the sum of its words. Both sides get the same outer and inner
folds and the same grid: SentEval's weight decay d on a mean cross-entropy over n rows is scikit-learn's
C = 1 / (n d) (its bias is not decayed; SentEval's is). scikit-learn goes to convergence. SentEval keeps 5 % of a
fold's training rows back to stop on (SST-2 has a dev split for it), so that scikit-learn's last fit is made twice: on
the rows that SentEval's has (the difference is to this one), and on all.

--scale multiplies the vectors. Nothing changes for scikit-learn but the strength of the penalty; SentEval's
Adam has a constant learning rate of 1e-3, so that entries far above 1 make it jump about the optimum: --scale 22.6
with --dim 512 are word vectors of N(0, 1).

The error beside a difference is its standard error: over the ten outer folds, or over the test rows that only one
of the two gets right.
"""

from __future__ import annotations

import argparse
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression

from embedlab.evaluation.classifier import LabelledVectors
from embedlab.evaluation.transfer import (
    L2_GRID,
    MODES,
    Outcome,
    classifier_inputs,
    final_job,
    stratified_folds,
    task_outcome,
)
from embedlab.evaluation.transfer_data import SEVEN, TASKS, Split, load_transfer
from embedlab.evaluation.vectors import embed

Rows = NDArray[np.int64]


class RandomProjection:
    """A bag of words, projected to `dim` random directions."""

    def __init__(self, dim: int, scale: float = 1.0) -> None:
        self.dim, self.scale = dim, scale
        self._words: dict[str, NDArray[np.float32]] = {}

    def encode(self, sentences: Sequence[str]) -> NDArray[np.float32]:
        """Vectors [n, dim]."""
        empty = np.zeros(self.dim, dtype=np.float32)
        return np.stack(
            [sum(map(self._word, re.findall(r"\w+|[^\w\s]", text.lower())), empty) for text in sentences]
        )

    def _word(self, word: str) -> NDArray[np.float32]:
        if word not in self._words:
            drawn = np.random.default_rng(zlib.crc32(word.encode())).standard_normal(self.dim)
            self._words[word] = (self.scale * drawn / np.sqrt(self.dim)).astype(np.float32)
        return self._words[word]


@dataclass(frozen=True)
class Agreement:
    """Test accuracies in percent, the standard error of their difference, and the seconds that each side took."""

    task: str
    senteval: float
    sklearn: float
    all_rows: float
    error: float
    seconds: tuple[float, float]

    @property
    def difference(self) -> float:
        """SentEval's classifier minus scikit-learn's on the same rows."""
        return self.senteval - self.sklearn


def compare(task: str, splits: dict[str, Split], encoder: RandomProjection) -> Agreement:
    """Both accuracies of one task."""
    texts = [text for split in splits.values() for side in (split.first, split.second or []) for text in side]
    vectors = embed(encoder, texts)
    start = perf_counter()
    ours: Outcome = task_outcome(vectors, task, splits, MODES["test"])
    middle = perf_counter()
    x = classifier_inputs(vectors, list(splits.values()))
    y = np.concatenate([split.labels for split in splits.values()])
    data = LabelledVectors(x, y, len(TASKS[task].classes))
    starts = np.cumsum([0, *(len(split) for split in splits.values())])
    rows = {name: np.arange(starts[i], starts[i + 1]) for i, name in enumerate(splits)}
    reference = _Reference(data, x.double().numpy(), y)
    if "test" in rows:
        same, whole = reference.fixed(rows)
        assert ours.predictions is not None
        change = 100.0 * ((ours.predictions == y[rows["test"]]).astype(int) - same)
    else:
        same, whole = reference.nested(rows["all"])
        change = np.array(ours.folds) - 100 * same
    error = float(np.std(change, ddof=1) / np.sqrt(len(change)))
    seconds = (middle - start, perf_counter() - middle)
    return Agreement(task, ours.accuracy, 100 * float(same.mean()), 100 * float(whole.mean()), error, seconds)


class _Reference:
    """SentEval's selection around scikit-learn's logistic regression."""

    def __init__(self, data: LabelledVectors, x: NDArray[np.float64], y: NDArray[np.int64]) -> None:
        self.data, self.x, self.y = data, x, y
        # Newton's steps solve a dense system each: few of them, and exact. Six classes are too many for it.
        self.solver = "newton-cholesky" if data.classes == 2 else "lbfgs"

    def right(self, train: Rows, test: Rows, decay: float) -> NDArray[np.float64]:
        """1 for each row of `test` that a fit on `train` gets right, else 0."""
        model = LogisticRegression(C=1 / (decay * len(train)), solver=self.solver, max_iter=1000)
        found = model.fit(self.x[train], self.y[train]).predict(self.x[test])
        return np.asarray(found == self.y[test], dtype=np.float64)

    def chosen(self, splits: Sequence[tuple[Rows, Rows]]) -> float:
        """The weight decay with the best mean accuracy over `splits`."""
        means = [np.mean([self.right(a, b, decay).mean() for a, b in splits]) for decay in L2_GRID]
        return L2_GRID[int(np.argmax(np.round(means, 4)))]

    def fixed(self, rows: dict[str, Rows]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Which test rows are right after a fit on SentEval's rows, and on all; dev, or folds, choose the decay."""
        if "dev" in rows:
            decay = self.chosen([(rows["train"], rows["dev"])])
            same = whole = self.right(rows["train"], rows["test"], decay)
            return same, whole
        return self._both(rows["train"], rows["test"])

    def nested(self, rows: Rows) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Accuracies of the outer folds, fitted on SentEval's rows, and on all."""
        found = [[right.mean() for right in self._both(rest, held)] for rest, held in self._folds(rows)]
        same, whole = np.array(found).T
        return same, whole

    def _both(self, train: Rows, test: Rows) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        decay = self.chosen(self._folds(train))
        fitted = final_job(train, decay, MODES["test"]).train
        return self.right(fitted, test, decay), self.right(train, test, decay)

    def _folds(self, rows: Rows) -> list[tuple[Rows, Rows]]:
        return stratified_folds(self.data, rows, MODES["test"].folds)


def main() -> None:
    """Prints a row for each task."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("data_dir", type=Path)
    parser.add_argument("--tasks", default=",".join(SEVEN))
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--scale", type=float, default=1.0)
    options = parser.parse_args()
    print(f"random projection of a bag of words, {options.dim} wide, scale {options.scale:g}")
    print(
        "| task | SentEval's classifier | scikit-learn, the same rows | difference | ± | all rows | seconds | seconds |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for task in options.tasks.split(","):
        encoder = RandomProjection(options.dim, options.scale)
        found = compare(task, load_transfer(task, options.data_dir), encoder)
        cells = (
            task,
            f"{found.senteval:.2f}",
            f"{found.sklearn:.2f}",
            f"{found.difference:+.2f}",
            f"{found.error:.2f}",
            f"{found.all_rows:.2f}",
            *(f"{seconds:.0f}" for seconds in found.seconds),
        )
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
