"""Transfer accuracy by SentEval's classifier against scikit-learn's logistic regression, on the same vectors.

    python benchmarks/transfer_agreement.py FOLDER --seeds 8 [--tasks cr,subj] [--out agreement.json]

The vectors are a bag of words under a random projection: each word's entries are N(0, 1 / dim), which keeps
lengths (Johnson & Lindenstrauss), and a sentence is the sum of its words. Every seed draws another projection; folds
keep SentEval's seed. Both sides get the same outer and inner folds, the same grid and the same objective:
SentEval's weight decay d on a mean softmax cross-entropy over n rows is scikit-learn's C = 1 / (n d), twice that
for two classes, where scikit-learn has one weight vector for SentEval's two; the bias is a column of ones, since
SentEval decays it as well. scikit-learn goes to convergence. SentEval keeps 5 % of a fold's training rows back to
stop on (SST-2 has a dev split for it), so that scikit-learn's last fit is made twice: on the rows that SentEval's has
(the difference is to this one), and on all.

A third arm tells the protocol from the code: `to the end` is our classifier on the same rows with scikit-learn's
choice of decay, without the early stop: Adam takes --passes steps, each on all rows. What it still differs from
scikit-learn by is a matter of the code; what SentEval's classifier differs by beyond that, of its early stop.

--scale multiplies the vectors. Nothing changes for scikit-learn but the strength of the penalty; SentEval's
Adam has a constant learning rate of 1e-3, so that entries far above 1 make it jump about the optimum: --scale 22.6
with --dim 512 are word vectors of N(0, 1).

The error beside a mean is its standard error over the seeds: the test rows are the same in all. With one seed it is
that of the difference: over the ten outer folds, or over the test rows that only one of the two gets right.
"""

from __future__ import annotations

import argparse
import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression

from embedlab.evaluation.core.files import Labelled
from embedlab.evaluation.core.vectors import embed
from embedlab.evaluation.transfer.classifier import ClassifierConfig, Job, LabelledVectors, fit_linear
from embedlab.evaluation.transfer.transfer import (
    L2_GRID,
    MODES,
    ProbeResult,
    classifier_inputs,
    final_job,
    stratified_folds,
    task_outcome,
)
from embedlab.evaluation.transfer.transfer_data import SEVEN, TASKS, load_transfer

Rows = NDArray[np.int64]


class RandomProjection:
    """A bag of words, projected to `dim` random directions."""

    def __init__(self, dim: int, scale: float = 1.0, seed: int = 0) -> None:
        self.dim, self.scale, self.seed = dim, scale, seed
        self._words: dict[str, NDArray[np.float32]] = {}

    def encode(self, sentences: Sequence[str]) -> NDArray[np.float32]:
        """Vectors [n, dim]."""
        empty = np.zeros(self.dim, dtype=np.float32)
        return np.stack(
            [sum(map(self._word, re.findall(r"\w+|[^\w\s]", text.lower())), empty) for text in sentences]
        )

    def _word(self, word: str) -> NDArray[np.float32]:
        if word not in self._words:
            drawn = np.random.default_rng([zlib.crc32(word.encode()), self.seed]).standard_normal(self.dim)
            self._words[word] = (self.scale * drawn / np.sqrt(self.dim)).astype(np.float32)
        return self._words[word]


@dataclass(frozen=True)
class Agreement:
    """Test accuracies of one seed in percent.

    senteval: the protocol; sklearn: on the same rows; all_rows: on the 5 % as well that stop SentEval's;
    to_the_end: our classifier on the same rows without an early stop (None: not run); error: standard error of
    `difference` over folds, or test rows; seconds: of each side.
    """

    task: str
    seed: int
    senteval: float
    sklearn: float
    all_rows: float
    to_the_end: float | None
    error: float
    seconds: dict[str, float]

    @property
    def difference(self) -> float:
        """SentEval's classifier minus scikit-learn's on the same rows."""
        return self.senteval - self.sklearn


def compare(
    task: str, splits: dict[str, Labelled], encoder: RandomProjection, passes: int = 3000
) -> Agreement:
    """The accuracies of one task; `passes` of the arm without an early stop, 0 to leave it out."""
    texts = [text for split in splits.values() for side in (split.first, split.second or []) for text in side]
    vectors = embed(encoder, texts)
    clock = [perf_counter()]
    ours: ProbeResult = task_outcome(vectors, task, splits, MODES["test"])
    clock.append(perf_counter())
    x = classifier_inputs(vectors, list(splits.values()))
    y = np.concatenate([split.labels for split in splits.values()])
    data = LabelledVectors(x, y, len(TASKS[task].classes))
    starts = np.cumsum([0, *(len(split) for split in splits.values())])
    rows = {name: np.arange(starts[i], starts[i + 1]) for i, name in enumerate(splits)}
    fits = _Reference(data).fits(rows)
    right = [fit.right for fit in fits]
    clock.append(perf_counter())
    if "test" in rows:
        assert ours.predictions is not None
        change = 100.0 * ((ours.predictions == y[rows["test"]]).astype(int) - right[0])
    else:
        change = np.array(ours.folds) - 100 * np.array([each.mean() for each in right])
    ended = [trained_to_the_end(data, fit, passes) for fit in fits] if passes else None
    clock.append(perf_counter())
    return Agreement(
        task,
        encoder.seed,
        ours.accuracy,
        100 * float(np.mean([each.mean() for each in right])),
        100 * float(np.mean([fit.right_of_all.mean() for fit in fits])),
        None if ended is None else 100 * float(np.mean(ended)),
        float(np.std(change, ddof=1) / np.sqrt(len(change))),
        dict(zip(("senteval", "sklearn", "to_the_end"), np.diff(clock).round(1).tolist(), strict=True)),
    )


def trained_to_the_end(data: LabelledVectors, fit: _Fit, passes: int) -> float:
    """Accuracy of our classifier on the test rows of `fit` after `passes` steps on all its training rows."""
    # One round: what it ends with is kept, whatever the dev rows say.
    config = ClassifierConfig("adam", len(fit.train), tenacity=0, epoch_size=passes, max_epoch=passes - 1)
    (found,) = fit_linear(data, [Job(fit.train, fit.test, (fit.decay,))], config)
    return int(data.correct(found.weight, torch.as_tensor(fit.test))[0]) / len(fit.test)


@dataclass(frozen=True)
class _Fit:
    """scikit-learn's final fit on `train`: which of the `test` rows are right (1, or 0) then, and after a fit that
    had all rows.
    """

    train: Rows
    test: Rows
    decay: float
    right: NDArray[np.float64]
    right_of_all: NDArray[np.float64]


class _Reference:
    """SentEval's selection around scikit-learn's logistic regression."""

    def __init__(self, data: LabelledVectors) -> None:
        self.data, self.x, self.y = data, data.x.double().numpy(), data.y.numpy()
        # Newton's steps solve a dense system each: few of them, and exact. Six classes are too many for it.
        self.solver = "newton-cholesky" if data.classes == 2 else "lbfgs"

    def right(self, train: Rows, test: Rows, decay: float) -> NDArray[np.float64]:
        """1 for each row of `test` that a fit on `train` gets right, else 0."""
        # Two opposite vectors of length w / 2 are penalised half as much as one of length w.
        c = (2 if self.data.classes == 2 else 1) / (decay * len(train))
        model = LogisticRegression(C=c, solver=self.solver, fit_intercept=False, tol=1e-6, max_iter=3000)
        found = model.fit(self.x[train], self.y[train]).predict(self.x[test])
        return np.asarray(found == self.y[test], dtype=np.float64)

    def chosen(self, splits: Sequence[tuple[Rows, Rows]]) -> float:
        """The weight decay with the best mean accuracy over `splits`."""
        means = [np.mean([self.right(a, b, decay).mean() for a, b in splits]) for decay in L2_GRID]
        return L2_GRID[int(np.argmax(np.round(means, 4)))]

    def fits(self, rows: dict[str, Rows]) -> list[_Fit]:
        """One for each outer fold, or for the test split; dev, or inner folds, choose the decay."""
        if "dev" in rows:
            decay = self.chosen([(rows["train"], rows["dev"])])
            right = self.right(rows["train"], rows["test"], decay)
            return [_Fit(rows["train"], rows["test"], decay, right, right)]
        if "test" in rows:
            return [self._final(rows["train"], rows["test"])]
        return [self._final(rest, held) for rest, held in self._folds(rows["all"])]

    def _final(self, train: Rows, test: Rows) -> _Fit:
        decay = self.chosen(self._folds(train))
        kept = final_job(train, decay, MODES["test"]).train
        return _Fit(kept, test, decay, self.right(kept, test, decay), self.right(train, test, decay))

    def _folds(self, rows: Rows) -> list[tuple[Rows, Rows]]:
        return stratified_folds(self.data, rows, MODES["test"].folds)


@dataclass(frozen=True)
class Mean:
    """A mean over `n` seeds and its standard error, None where one seed tells nothing of it."""

    mean: float
    error: float | None
    n: int = 1

    def __str__(self) -> str:
        return f"{self.mean:+.2f}" + ("" if self.error is None else f" ± {self.error:.2f}") + f" (n={self.n})"


def over_seeds(found: Sequence[Agreement]) -> dict[str, Mean]:
    """Of one task: SentEval's classifier, and our classifier trained to the end, minus scikit-learn's."""
    changes = _mean([each.difference for each in found])
    ended = [each.to_the_end - each.sklearn for each in found if each.to_the_end is not None]
    return {
        "difference": Mean(changes.mean, found[0].error) if len(found) == 1 else changes,
        **({"to_the_end": _mean(ended)} if ended else {}),
    }


def _mean(values: Sequence[float]) -> Mean:
    error = float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None
    return Mean(float(np.mean(values)), error, len(values))


def main() -> None:
    """Prints a row for each task; `--out` keeps every seed's accuracies as they come."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("data_dir", type=Path)
    parser.add_argument("--tasks", default=",".join(SEVEN))
    parser.add_argument("--seeds", type=int, default=1, help="random projections")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--passes", type=int, default=3000, help="steps of the arm without an early stop")
    parser.add_argument(
        "--ends", type=int, help="seeds that have that arm (default: all); it is the slow one"
    )
    parser.add_argument("--out", type=Path, help="JSON of all seeds; seeds that are in it are not run again")
    options = parser.parse_args()
    print(
        f"random projection of a bag of words, {options.dim} wide, scale {options.scale:g}, {options.seeds} seeds"
    )
    print(
        "| task | SentEval's classifier | scikit-learn, the same rows | difference "
        "| to the end, minus scikit-learn | scikit-learn, all rows | seconds |"
    )
    print("|---|---|---|---|---|---|---|")
    settings = {"dim": options.dim, "scale": options.scale, "passes": options.passes}
    done = _done(options.out, settings)
    for task in options.tasks.split(","):
        splits = load_transfer(task, options.data_dir)
        for seed in range(options.seeds):
            if (task, seed) not in done:
                encoder = RandomProjection(options.dim, options.scale, seed)
                ends = options.ends is None or seed < options.ends
                done[task, seed] = compare(task, splits, encoder, options.passes if ends else 0)
                _write(options.out, settings, done)
        found = [done[task, seed] for seed in range(options.seeds)]
        means = over_seeds(found)
        cells = (
            task,
            f"{np.mean([each.senteval for each in found]):.2f}",
            f"{np.mean([each.sklearn for each in found]):.2f}",
            str(means["difference"]),
            str(means.get("to_the_end", "-")),
            f"{np.mean([each.all_rows for each in found]):.2f}",
            " + ".join(f"{sum(each.seconds[side] for each in found):.0f}" for side in found[0].seconds),
        )
        print(f"| {' | '.join(cells)} |", flush=True)


def _done(path: Path | None, settings: dict[str, float]) -> dict[tuple[str, int], Agreement]:
    if path is None or not path.exists():
        return {}
    content = json.loads(path.read_text())
    if content["settings"] != settings:
        raise SystemExit(f"{path} was made with {content['settings']}: name another file")
    return {(row["task"], row["seed"]): Agreement(**row) for row in content["runs"]}


def _write(path: Path | None, settings: dict[str, float], done: dict[tuple[str, int], Agreement]) -> None:
    if path is None:
        return
    tasks = list(dict.fromkeys(task for task, _ in done))
    means = {task: over_seeds([each for (name, _), each in done.items() if name == task]) for task in tasks}
    content = {
        "settings": settings,
        "means": {task: {name: asdict(mean) for name, mean in each.items()} for task, each in means.items()},
        "runs": [asdict(each) for each in done.values()],
    }
    whole = path.with_suffix(".part")
    whole.write_text(json.dumps(content, indent=1))
    whole.replace(path)


if __name__ == "__main__":
    main()
