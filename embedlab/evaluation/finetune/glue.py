"""GLUE's classification tasks: fine-tuned on train, scored on dev, where its test labels are not public."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embedlab.evaluation.core.correlation import accuracy, f1
from embedlab.evaluation.core.files import Hub, Labelled, find_file, read_labelled
from embedlab.evaluation.core.settings import chosen, folder_of, limit_note, names, row_limit
from embedlab.evaluation.core.suite import Scored, Settings
from embedlab.evaluation.finetune.classify import classify
from embedlab.evaluation.finetune.config import FineTuneConfig, FineTunedSuite

DEFAULTS = FineTuneConfig(epochs=3, lr=2e-5, batch_size=16, max_length=128)
_PAIR, _HUB_PAIR = ("premise", "hypothesis"), ("sentence1", "sentence2")
_ENTAILED = ("entailment", "not_entailment")


@dataclass(frozen=True)
class Task:
    """texts: columns of the local files; hub_texts: of the hub, () for the same; classes: labels in the order of
    the hub's numbers; metrics: the first one is the task's score in GLUE's average; folder, test: where the local
    files are and what the scored one is called."""

    texts: tuple[str, ...] = ("sentence",)
    hub_texts: tuple[str, ...] = ()
    classes: tuple[str, ...] = ("0", "1")
    metrics: tuple[str, ...] = ("accuracy",)
    folder: str = "glue"
    test: str = "dev"
    hub_test: str = "validation"


TASKS: dict[str, Task] = {
    "cola": Task(metrics=("mcc", "accuracy")),
    # SentEval's copy: the same phrases and the same dev set as GLUE's, tokenised and lower-cased.
    "sst2": Task(folder="transfer"),
    # SentEval's: train is GLUE's train and dev, so the test set is scored.
    "mrpc": Task(_HUB_PAIR, metrics=("accuracy", "f1"), folder="transfer", test="test"),
    "rte": Task(_PAIR, _HUB_PAIR, _ENTAILED),
    "wnli": Task(_PAIR, _HUB_PAIR, _ENTAILED[::-1]),
    "qnli": Task(_PAIR, ("question", "sentence"), _ENTAILED),
    "qqp": Task(("question1", "question2"), metrics=("accuracy", "f1")),
    "mnli": Task(_PAIR, classes=("entailment", "neutral", "contradiction"), hub_test="validation_matched"),
}
SMALL = ("cola", "sst2", "mrpc", "rte")


class GLUE(FineTunedSuite):
    """Settings: data_dir (folder of glue/ and transfer/; None: the hub), tasks (default
    `SMALL`), limit (rows of each split), finetune.* (`FineTuneConfig`), dtype.

    Scores in percent: "cola/mcc", "mrpc/accuracy", "mrpc/f1", ..., and their mean over tasks "glue/mean" (CoLA:
    Matthews correlation; the others: accuracy). The last weights are scored: dev must not choose them.
    """

    name = "glue"
    folders = ("glue", "transfer")
    keys = ("tasks", "limit", "finetune")
    defaults = DEFAULTS

    def load(self, settings: Settings) -> dict[str, tuple[Labelled, Labelled]]:
        """Train and scored set by task."""
        self.config(settings)
        limit = row_limit(settings)
        tasks = chosen(names(settings, "tasks") or SMALL, tuple(TASKS), "tasks")
        loaded = {name: load(name, settings) for name in tasks}
        return {name: (train.head(limit), test.head(limit)) for name, (train, test) in loaded.items()}

    def score(self, encoder: Any, data: dict[str, tuple[Labelled, Labelled]], settings: Settings) -> Scored:
        """Train on each task, and score its metrics."""
        config = self.config(settings)
        scores: dict[str, float] = {}
        fits = {}
        for name, (training, test) in data.items():
            task = TASKS[name]
            found, fits[name] = classify(
                encoder, training, {name: test}, len(task.classes), config, settings, name
            )
            for metric in task.metrics:
                scores[f"{name}/{metric}"] = METRICS[metric](found[name], test.labels)
        if len(data) > 1:
            scores["glue/mean"] = fmean(scores[f"{name}/{TASKS[name].metrics[0]}"] for name in data)
        local_mrpc = "mrpc" in data and not data["mrpc"][0].source.startswith("hub:")
        return self.result(
            encoder,
            scores,
            name="glue_dev",
            aggregation="first metric of each task, mean over tasks",
            data={
                name: {"train": training.source, "test": test.source, "rows": [len(training), len(test)]}
                for name, (training, test) in data.items()
            },
            warnings=limit_note(row_limit(settings)),
            notes=["encoder template and pooling play no part: the head reads the backbone's last layer"]
            + (
                ["mrpc: trained on GLUE's train and dev, scored on its test set (SentEval's files)"]
                if local_mrpc
                else []
            ),
            seed=config.seed,
            finetune=config.plain() | {"tasks": fits},
        )


def load(name: str, settings: Mapping[str, Any]) -> tuple[Labelled, Labelled]:
    """Train and scored set of one task of `TASKS`.

    Raises UserError for a missing or broken file, or an unknown label.
    """
    task = TASKS[name]
    folder = folder_of(settings, task.folder)
    files = f"{name}_train.tsv.gz and {name}_{task.test}.tsv.gz"

    def read(split: str, hub_split: str) -> Labelled:
        path = folder and find_file(folder, f"{name}_{split}")
        hub = Hub("nyu-mll/glue", name, hub_split, files, ("label", *(task.hub_texts or task.texts)))
        return read_labelled(path, task.texts, task.classes, hub)

    return read("train", "train"), read(task.test, task.hub_test)


def mcc(predicted: NDArray[np.int64], gold: NDArray[np.int64]) -> float:
    """Matthews correlation of two labels x100; 0 where a side has one label only."""
    a, b = (predicted == 1).astype(np.int64), (gold == 1).astype(np.int64)
    both, neither = int((a & b).sum()), int(((1 - a) & (1 - b)).sum())
    false, missed = int((a & (1 - b)).sum()), int(((1 - a) & b).sum())
    norm = (both + false) * (both + missed) * (neither + false) * (neither + missed)
    return 100 * (both * neither - false * missed) / math.sqrt(norm) if norm else 0.0


METRICS = {"accuracy": accuracy, "f1": f1, "mcc": mcc}
