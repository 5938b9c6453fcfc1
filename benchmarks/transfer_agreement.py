"""Transfer accuracy by SentEval's classifier against scikit-learn's logistic regression, on the same vectors.

    python benchmarks/transfer_agreement.py ../shared/data/transfer [--tasks cr,subj] [--dim 128] [--scale 1]

The vectors are a bag of words under a random projection: each word's entries are N(0, 1 / dim), which keeps
lengths (Johnson & Lindenstrauss), and a sentence is the sum of its words. Both sides get the same outer and inner
folds and the same grid: SentEval's weight decay d on a mean cross-entropy over n rows is scikit-learn's
C = 1 / (n d) (its bias is not decayed; SentEval's is). scikit-learn fits all training rows of a fold to
convergence; SentEval keeps 5 % of them back to stop on.

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
    error: float
    seconds: tuple[float, float]

    @property
    def difference(self) -> float:
        """SentEval's classifier minus scikit-learn's."""
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
        theirs = reference.fixed(rows)
        assert ours.predictions is not None
        right = [labels == y[rows["test"]] for labels in (ours.predictions, theirs)]
        change = 100.0 * (right[0].astype(int) - right[1])
        accuracy = 100 * float(right[1].mean())
    else:
        folds = reference.nested(rows["all"])
        change, accuracy = np.subtract(ours.folds, folds), float(np.mean(folds))
    error = float(np.std(change, ddof=1) / np.sqrt(len(change)))
    return Agreement(task, ours.accuracy, accuracy, error, (middle - start, perf_counter() - middle))


class _Reference:
    """SentEval's selection around scikit-learn's logistic regression."""

    def __init__(self, data: LabelledVectors, x: NDArray[np.float64], y: NDArray[np.int64]) -> None:
        self.data, self.x, self.y = data, x, y
        # Newton's steps solve a dense system each: few of them, and exact. Six classes are too many for it.
        self.solver = "newton-cholesky" if data.classes == 2 else "lbfgs"

    def predict(self, train: Rows, test: Rows, decay: float) -> NDArray[np.int64]:
        """Labels of the rows `test` after a fit on `train`."""
        model = LogisticRegression(C=1 / (decay * len(train)), solver=self.solver, max_iter=1000)
        found: NDArray[np.int64] = model.fit(self.x[train], self.y[train]).predict(self.x[test])
        return found

    def accuracy(self, train: Rows, test: Rows, decay: float) -> float:
        """In [0, 1]."""
        return float((self.predict(train, test, decay) == self.y[test]).mean())

    def chosen(self, splits: Sequence[tuple[Rows, Rows]]) -> float:
        """The weight decay with the best mean accuracy over `splits`."""
        means = [np.mean([self.accuracy(a, b, decay) for a, b in splits]) for decay in L2_GRID]
        return L2_GRID[int(np.argmax(np.round(means, 4)))]

    def fixed(self, rows: dict[str, Rows]) -> NDArray[np.int64]:
        """Labels of the test rows; dev, or folds of train, choose the decay."""
        dev = [(rows["train"], rows["dev"])] if "dev" in rows else self._folds(rows["train"])
        return self.predict(rows["train"], rows["test"], self.chosen(dev))

    def nested(self, rows: Rows) -> list[float]:
        """Accuracy of each outer fold in percent."""
        return [
            100 * self.accuracy(rest, held, self.chosen(self._folds(rest)))
            for rest, held in self._folds(rows)
        ]

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
    print("| task | SentEval's classifier | scikit-learn | difference | ± | seconds | seconds |")
    print("|---|---|---|---|---|---|---|")
    for task in options.tasks.split(","):
        encoder = RandomProjection(options.dim, options.scale)
        found = compare(task, load_transfer(task, options.data_dir), encoder)
        print(
            f"| {task} | {found.senteval:.2f} | {found.sklearn:.2f} | {found.difference:+.2f} | {found.error:.2f} "
            f"| {found.seconds[0]:.0f} | {found.seconds[1]:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
