"""SentEval's transfer tasks: frozen vectors, a linear softmax classifier, accuracy (`specs/evaluation.md`
5.3).

MR, CR, SUBJ, MPQA: nested stratified k-fold; the inner folds choose the L2, then one classifier is fitted on
the outer fold's training rows (5 % of them stop it) and scored on its held-out rows; the score is the mean
over outer folds. TREC, MRPC: k-fold on train chooses the L2, one classifier is fitted on train and scored on
test. SST-2: fixed train, dev and test; dev chooses the L2 and stops the fit. Means over folds are rounded to
two decimals, and the first of equal L2 values wins, as upstream: rounding decides ties.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embedlab.errors import UserError
from embedlab.evaluation.core.correlation import f1
from embedlab.evaluation.core.files import Labelled
from embedlab.evaluation.core.protocol import ResultCache
from embedlab.evaluation.core.settings import require, scoring_device, task_names
from embedlab.evaluation.core.suite import Scored, Settings, Suite
from embedlab.evaluation.core.vectors import Encoder, SharedVectors, embed
from embedlab.evaluation.transfer.classifier import ClassifierConfig, Fitted, Job, LabelledVectors, fit_linear
from embedlab.evaluation.transfer.transfer_data import SEVEN, TASKS, load_transfer, source

L2_GRID = (1e-5, 1e-4, 1e-3, 1e-2)
_TO_STOP_ON = 20  # rows, of which 5 % are one
SEED = 1111


@dataclass(frozen=True)
class Mode:
    """Folds and classifier settings of one evaluation mode (SimCSE `evaluation.py`)."""

    folds: int
    classifier: ClassifierConfig


MODES = {
    "test": Mode(10, ClassifierConfig("adam", batch_size=64, tenacity=5, epoch_size=4)),
    "fast": Mode(5, ClassifierConfig("rmsprop", batch_size=128, tenacity=3, epoch_size=2)),
}
# SimCSE's names: both train alike, and both scores are reported here.
_ALIASES = {"dev": "fast", "fasttest": "fast"}


@dataclass(frozen=True)
class ProbeResult:
    """Accuracies in percent; `folds`: test accuracy of each outer fold (one entry without outer folds);
    `l2`: the chosen value of each; `predictions`: labels of the test split, None under cross-validation."""

    accuracy: float
    dev_accuracy: float
    folds: list[float]
    l2: list[float]
    predictions: np.ndarray | None = None


class Transfer(Suite):
    """The seven transfer tasks.

    Settings: data_dir (None: the hub), tasks (default `SEVEN`), mode (test, or fast
    for 5 folds with rmsprop; scores of different modes do not compare), device (where classifiers are
    trained: cpu, cuda), kept (a file for finished tasks: a stopped run that is started again goes on after
    them).

    Scores: "mr/accuracy", "mr/dev_accuracy", ..., "mrpc/f1", and over all seven "transfer7/accuracy".
    """

    name = "transfer"
    folders = ("transfer",)
    keys = ("tasks", "mode")

    def load(self, settings: Settings) -> dict[str, dict[str, Labelled]]:
        """Splits by task."""
        mode = MODES[mode_name(settings)]
        data_dir = settings.get("data_dir")
        tasks = task_names(settings, SEVEN, "transfer")
        loaded = {task: load_transfer(task, data_dir) for task in tasks}
        for task, splits in loaded.items():
            # Only where there is a key for it.
            check_rows(
                task, splits, mode.folds, data_dir, "mode=fast for 5 folds" if "mode" in settings else ""
            )
        return loaded

    def score(self, encoder: Encoder, data: dict[str, dict[str, Labelled]], settings: Settings) -> Scored:
        """Fit the classifiers of each task."""
        name = mode_name(settings)
        mode, data_dir, device = MODES[name], settings.get("data_dir"), scoring_device(settings.get("device"))
        kept = ResultCache(settings.get("kept"), encoder, suite=self.name, mode=name, l2_grid=L2_GRID)
        shared = SharedVectors(encoder, {task: _all_texts(splits) for task, splits in data.items()})
        scores: dict[str, float] = {}
        chosen: dict[str, list[float]] = {}
        reused: list[str] = []
        for task, splits in data.items():
            rows = {split: [s.first, s.second, s.labels.tolist()] for split, s in splits.items()}
            result = kept.get(task, rows)
            if result is not None:
                reused.append(task)
            else:
                result = _score_task(shared, task, splits, mode, device)
                kept.put(task, rows, result)
            scores |= result["scores"]
            chosen[task] = result["l2"]
        if set(data) == set(SEVEN):
            for metric in ("accuracy", "dev_accuracy"):
                scores[f"transfer7/{metric}"] = float(np.mean([scores[f"{task}/{metric}"] for task in SEVEN]))
        return self.result(
            encoder,
            scores,
            name="senteval_transfer" if name == "test" else "senteval_transfer_fast",
            aggregation="mean over folds (MR, CR, SUBJ, MPQA); mean of tasks",
            text="tok",
            sentences=[text for splits in data.values() for text in _all_texts(splits)],
            data={
                task: {
                    "source": source(task, data_dir),
                    "rows": {split: len(rows) for split, rows in splits.items()},
                }
                for task, splits in data.items()
            },
            warnings=_row_warnings(data),
            notes=[f"scored before an interruption: {', '.join(reused)}"] if reused else [],
            seed=SEED,
            mode=name,
            folds=mode.folds,
            l2_grid=list(L2_GRID),
            l2_chosen=chosen,
            classifier={**vars(mode.classifier), "hidden": 0, "loss": "mean cross-entropy"},
        )


def mode_name(settings: Settings) -> str:
    """The key ``mode``: test or fast. UserError for another."""
    given = settings.get("mode") or "test"
    name = str(_ALIASES.get(given, given))
    if name not in MODES:
        raise UserError("no such mode", key="mode", value=name, fix="choose test or fast")
    return name


def _score_task(
    shared: SharedVectors, task: str, splits: Mapping[str, Labelled], mode: Mode, device: str | torch.device
) -> dict[str, Any]:
    """The scores of one task under their names, and the chosen L2 values."""
    outcome = task_outcome(shared.take(task), task, splits, mode, device)
    scores = {f"{task}/accuracy": outcome.accuracy, f"{task}/dev_accuracy": outcome.dev_accuracy}
    if task == "mrpc":
        assert outcome.predictions is not None
        scores["mrpc/f1"] = round(f1(outcome.predictions, splits["test"].labels), 2)
    return {"scores": scores, "l2": outcome.l2}


def evaluate_task(
    encoder: Encoder,
    task: str,
    splits: Mapping[str, Labelled],
    mode: Mode,
    device: str | torch.device = "cpu",
) -> ProbeResult:
    """Encode one task's texts and score it by its protocol, for which no split may be too small (`check_rows`)."""
    return task_outcome(embed(encoder, _all_texts(splits)), task, splits, mode, device)


def task_outcome(
    vectors: Tensor, task: str, splits: Mapping[str, Labelled], mode: Mode, device: str | torch.device = "cpu"
) -> ProbeResult:
    """The protocol of one task on `vectors` of its texts, split after split, in each the first texts and then
    the second ones, for which no split may be too small (`check_rows`).
    """
    data = LabelledVectors(
        classifier_inputs(vectors, list(splits.values())).to(device),
        np.concatenate([split.labels for split in splits.values()]),
        len(TASKS[task].classes),
    )
    starts = np.cumsum([0, *(len(split) for split in splits.values())])
    rows = {name: np.arange(starts[i], starts[i + 1]) for i, name in enumerate(splits)}
    if "dev" in rows:
        return split_outcome(data, rows["train"], rows["dev"], rows["test"], mode)
    if "test" in rows:
        return kfold_outcome(data, rows["train"], rows["test"], mode)
    return nested_kfold_outcome(data, rows["all"], mode)


def check_rows(
    task: str, splits: Mapping[str, Labelled], folds: int, data_dir: Any = None, other: str = ""
) -> None:
    """See that there are rows for the folds that the protocol of a task cuts.

    Raises:
        UserError: too few rows, by file, label and count; no package to cut them with.
    """
    if "dev" in splits:
        return
    require("sklearn", "scikit-learn")
    split, classes = "train" if "test" in splits else "all", TASKS[task].classes
    labels = splits[split].labels
    counts = [(f"rows of label {name}", int((labels == i).sum()), folds) for i, name in enumerate(classes)]
    for what, there, left in (*counts, ("rows", len(labels), _TO_STOP_ON)):
        least = _leaving(left, folds) if split == "all" else left
        if there < least:
            raise UserError(
                f"has {there} {what}, and {folds} folds need {least}",
                file=source(task, data_dir, [split]),
                fix="give the whole data set" + (f", or {other}" if other else ""),
            )


def _leaving(rows: int, folds: int) -> int:
    """How many there must be for `rows` to be left without the largest of the folds."""
    return next(n for n in count(rows) if n - -(-n // folds) >= rows)


def nested_kfold_outcome(data: LabelledVectors, rows: np.ndarray, mode: Mode) -> ProbeResult:
    """Nested stratified k-fold over `rows`: every fold and L2 value in one call of `fit_linear`."""
    outer = stratified_folds(data, rows, mode.folds)
    jobs = [
        Job(train, dev, L2_GRID)
        for rest, _ in outer
        for train, dev in stratified_folds(data, rest, mode.folds)
    ]
    fits = fit_linear(data, jobs, mode.classifier)
    chosen = [_choose(fits[i : i + mode.folds]) for i in range(0, len(fits), mode.folds)]
    last = [final_job(rest, l2, mode) for (rest, _), (l2, _) in zip(outer, chosen, strict=True)]
    finals = fit_linear(data, last, mode.classifier)
    folds = [_percent(data, fit, held_out) for fit, (_, held_out) in zip(finals, outer, strict=True)]
    dev = [score for _, score in chosen]
    return ProbeResult(
        round(float(np.mean(folds)), 2), round(float(np.mean(dev)), 2), folds, [l2 for l2, _ in chosen]
    )


def kfold_outcome(data: LabelledVectors, train: np.ndarray, test: np.ndarray, mode: Mode) -> ProbeResult:
    """Stratified k-fold over `train` chooses the L2; then train against test."""
    jobs = [Job(rest, dev, L2_GRID) for rest, dev in stratified_folds(data, train, mode.folds)]
    l2, dev_accuracy = _choose(fit_linear(data, jobs, mode.classifier))
    (final,) = fit_linear(data, [final_job(train, l2, mode)], mode.classifier)
    return _on_test(data, final, test, l2, dev_accuracy)


def split_outcome(
    data: LabelledVectors, train: np.ndarray, dev: np.ndarray, test: np.ndarray, mode: Mode
) -> ProbeResult:
    """Fixed train, dev and test. Upstream fits the chosen L2 a second time, with the same seed: the same
    classifier.
    """
    (fit,) = fit_linear(data, [Job(train, dev, L2_GRID)], mode.classifier)
    accuracies = [round(100 * accuracy, 2) for accuracy in fit.dev_accuracy]
    best = int(np.argmax(accuracies))
    chosen = Fitted(fit.weight[best : best + 1], [fit.dev_accuracy[best]], [fit.epochs[best]])
    return _on_test(data, chosen, test, L2_GRID[best], accuracies[best])


def stratified_folds(
    data: LabelledVectors, rows: np.ndarray, folds: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(rest, held out) rows of scikit-learn's shuffled stratified folds with SentEval's seed."""
    from sklearn.model_selection import StratifiedKFold

    labels = data.y[torch.as_tensor(rows)].cpu().numpy()
    cut = StratifiedKFold(folds, shuffle=True, random_state=SEED)
    return [(rows[rest], rows[held]) for rest, held in cut.split(np.zeros(len(rows)), labels)]


def _choose(fits: Sequence[Fitted]) -> tuple[float, float]:
    """The L2 with the best mean dev accuracy over the folds, and that accuracy in percent."""
    means = [
        round(100 * float(np.mean([fit.dev_accuracy[r] for fit in fits])), 2) for r in range(len(L2_GRID))
    ]
    best = int(np.argmax(means))
    return L2_GRID[best], means[best]


def final_job(rows: np.ndarray, l2: float, mode: Mode) -> Job:
    """Fit on 95 % of `rows`, stop on the other 5 %, drawn by the classifier's own seeded stream."""
    dev = int(0.05 * len(rows))
    order = np.random.RandomState(mode.classifier.seed).permutation(len(rows))
    return Job(rows[order[dev:]], rows[order[:dev]], (l2,), drawn=len(rows))


def _on_test(
    data: LabelledVectors, fit: Fitted, test: np.ndarray, l2: float, dev_accuracy: float
) -> ProbeResult:
    predicted = data.predict(fit.weight, torch.as_tensor(test, device=data.x.device))[0]
    accuracy = _percent(data, fit, test)
    return ProbeResult(accuracy, dev_accuracy, [accuracy], [l2], predicted.cpu().numpy())


def _percent(data: LabelledVectors, fit: Fitted, rows: np.ndarray) -> float:
    correct = data.correct(fit.weight, torch.as_tensor(rows, device=data.x.device))
    return round(100 * int(correct[0]) / len(rows), 2)


def _all_texts(splits: Mapping[str, Labelled]) -> list[str]:
    return [text for split in splits.values() for text in split.texts()]


def classifier_inputs(vectors: Tensor, splits: Sequence[Labelled]) -> Tensor:
    """Classifier inputs of all splits, one below the other: u [n, D], or [|u - v|, u * v] [n, 2 D] for
    pairs.
    """
    parts: list[Tensor] = []
    start = 0
    for split in splits:
        n = len(split)
        u = vectors[start : start + n]
        start += n
        if split.second is not None:
            v = vectors[start : start + n]
            start += n
            u = torch.cat([(u - v).abs(), u * v], dim=1)
        parts.append(u)
    return torch.cat(parts)


def _row_warnings(loaded: Mapping[str, Mapping[str, Labelled]]) -> list[str]:
    """Sentences for the splits whose row count is not SentEval's. A handful of empty rows may be missing (CR,
    MPQA).
    """
    return [
        f"{task} ({split}) has {len(rows)} rows, SentEval {expected}: not comparable with published scores"
        for task, splits in loaded.items()
        for split, rows in splits.items()
        if not (expected := TASKS[task].rows[split]) - 10 <= len(rows) <= expected
    ]
