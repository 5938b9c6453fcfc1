"""The seven SentEval transfer tasks as texts and integer labels, from local files or the hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from embedlab.errors import UserError
from embedlab.evaluation.core.files import find_file, hub_rows, numbered, read_tsv

SEVEN = ("mr", "cr", "subj", "mpqa", "sst2", "trec", "mrpc")
LABELS = {
    "mr": "MR",
    "cr": "CR",
    "subj": "SUBJ",
    "mpqa": "MPQA",
    "sst2": "SST",
    "trec": "TREC",
    "mrpc": "MRPC",
}
TREC_CLASSES = ("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM")


@dataclass(frozen=True)
class Split:
    """Texts of one split (a second list for pairs), and labels 0..classes-1 as int64 [n]."""

    first: list[str]
    second: list[str] | None
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.first)


@dataclass(frozen=True)
class HubSource:
    """Where a task is on the hub: per split the data set, its configuration and the hub splits that make it
    up.
    """

    splits: Mapping[str, tuple[str, str | None, tuple[str, ...]]]
    label: str = "label"
    texts: tuple[str, ...] = ("sentence",)


@dataclass(frozen=True)
class Task:
    """What is known of a task before its data are read.

    splits: file and split names, in the order train, dev, test (one name: a set for cross-validation).
    classes: names of the labels in the files, in the order of their numbers.
    rows: SentEval's row count of each split.
    """

    name: str
    splits: tuple[str, ...]
    label: str
    texts: tuple[str, ...]
    classes: tuple[str, ...]
    rows: tuple[int, ...]
    hub: HubSource

    def file(self, split: str) -> str:
        return self.name if len(self.splits) == 1 else f"{self.name}_{split}"


def _binary(name: str, rows: int, hub: str) -> Task:
    source = HubSource({"all": (hub, None, ("train", "test"))})
    return Task(name, ("all",), "label", ("sentence",), ("0", "1"), (rows,), source)


# The hub has no SentEval of its own. These are copies by others; their row order, and so the folds, can
# differ from SentEval's files by chance, which the protocol says through its `data` entry.
TASKS: dict[str, Task] = {
    "mr": _binary("mr", 10662, "rahulsikder223/SentEval-MR"),
    "cr": _binary("cr", 3775, "rahulsikder223/SentEval-CR"),
    "subj": _binary("subj", 10000, "rahulsikder223/SentEval-SUBJ"),
    "mpqa": _binary("mpqa", 10606, "rahulsikder223/SentEval-MPQA"),
    # GLUE's SST-2 test has no labels; SetFit's copy has them.
    "sst2": Task(
        "sst2",
        ("train", "dev", "test"),
        "label",
        ("sentence",),
        ("0", "1"),
        (67349, 872, 1821),
        HubSource(
            {
                "train": ("stanfordnlp/sst2", None, ("train",)),
                "dev": ("stanfordnlp/sst2", None, ("validation",)),
                "test": ("SetFit/sst2", None, ("test",)),
            }
        ),
    ),
    "trec": Task(
        "trec",
        ("train", "test"),
        "coarse",
        ("question",),
        TREC_CLASSES,
        (5452, 500),
        HubSource(
            {split: ("SetFit/TREC-QC", None, (split,)) for split in ("train", "test")},
            label="label_coarse_original",
            texts=("text",),
        ),
    ),
    # GLUE cuts MRPC's train into train and validation; SentEval uses it whole.
    "mrpc": Task(
        "mrpc",
        ("train", "test"),
        "label",
        ("sentence1", "sentence2"),
        ("0", "1"),
        (4076, 1725),
        HubSource(
            {
                "train": ("nyu-mll/glue", "mrpc", ("train", "validation")),
                "test": ("nyu-mll/glue", "mrpc", ("test",)),
            },
            texts=("sentence1", "sentence2"),
        ),
    ),
}


def load_transfer(name: str, data_dir: str | Path | None = None) -> dict[str, Split]:
    """The splits of one task (`SEVEN`), in SentEval's order.

    data_dir: folder (or its folder transfer/) with mr.tsv.gz, cr, subj, mpqa, sst2_{train,dev,test}, trec_{train,test},
    mrpc_{train,test} (.tsv or .tsv.gz; columns label and sentence; coarse and question; label, sentence1 and
    sentence2); None: the hub.

    SentEval sorts each split by its number of tokens, then by label, before it cuts folds, so the order is
    part of the protocol. Tokens are what white space separates, joined again by one space. Raises UserError
    for an unknown task, a missing or broken file, an unknown label, an empty split.
    """
    task = TASKS.get(name)
    if task is None:
        raise UserError(
            "no such transfer task", key="tasks", value=name, fix=f"choose from {', '.join(SEVEN)}"
        )
    return {split: _sorted(_read(task, split, data_dir)) for split in task.splits}


def source(name: str, data_dir: str | Path | None, splits: Sequence[str] | None = None) -> str:
    """Where `load_transfer` reads a task, or some of its splits."""
    task = TASKS[name]
    if data_dir is not None:
        return ", ".join(str(find_file(data_dir, task.file(s), "transfer")) for s in splits or task.splits)
    return "hub:" + ", ".join(sorted({hub for hub, _, _ in task.hub.splits.values()}))


def _read(task: Task, split: str, data_dir: str | Path | None) -> Split:
    if data_dir is not None:
        path = find_file(data_dir, task.file(split), "transfer")
        table = read_tsv(path, [task.label, *task.texts])
        return _split(task, table[task.label], [table[column] for column in task.texts], path)
    hub, config, parts = task.hub.splits[split]
    labels: list[Any] = []
    texts: list[list[str]] = [[] for _ in task.texts]
    for part in parts:
        columns = [task.hub.label, *task.hub.texts]
        rows = hub_rows(hub, config, part, columns, "the transfer files (mr.tsv.gz ... mrpc_test.tsv.gz)")
        labels += rows[task.hub.label]
        for side, column in zip(texts, task.hub.texts, strict=True):
            side += rows[column]
    return _split(task, [str(label) for label in labels], texts, f"hub:{hub}")


def _split(task: Task, labels: Sequence[str], texts: Sequence[Sequence[str]], file: str | Path) -> Split:
    if not labels:
        raise UserError("has no rows", file=file, fix="fetch the file again")
    sides = [[" ".join(text.split()) for text in side] for side in texts]
    numbers = numbered(labels, task.classes, file, task.label)
    return Split(sides[0], sides[1] if len(sides) > 1 else None, numbers)


def _sorted(split: Split) -> Split:
    second = split.second or [""] * len(split)
    keys = [
        (len(a.split()), len(b.split()), label)
        for a, b, label in zip(split.first, second, split.labels, strict=True)
    ]
    order = sorted(range(len(split)), key=keys.__getitem__)  # stable: rows that tie keep the file's order
    return Split(
        [split.first[i] for i in order],
        None if split.second is None else [split.second[i] for i in order],
        split.labels[order],
    )
