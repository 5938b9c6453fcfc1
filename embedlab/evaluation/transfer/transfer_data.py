"""The seven SentEval transfer tasks as texts and integer labels, from local files or the hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from embedlab.errors import UserError, one_of
from embedlab.evaluation.core.files import Hub, Labelled, find_file, read_labelled

SEVEN = ("mr", "cr", "subj", "mpqa", "sst2", "trec", "mrpc")
TREC_CLASSES = ("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM")
_PAIR = ("sentence1", "sentence2")


@dataclass(frozen=True)
class Task:
    """What is known of a task before its data are read.

    rows: SentEval's row count of each split, in the order train, dev, test ("all": a set for cross-validation).
    hub: of each split the data set on the hub, its configuration and the hub's splits that make it up.
    classes: names of the labels in the files, in the order of their numbers.
    hub_columns: of label and texts on the hub; (): the same.
    """

    name: str
    rows: Mapping[str, int]
    hub: Mapping[str, tuple[str, str | None, str]]
    texts: tuple[str, ...] = ("sentence",)
    label: str = "label"
    classes: tuple[str, ...] = ("0", "1")
    hub_columns: tuple[str, ...] = ()

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self.rows)

    def file(self, split: str) -> str:
        return self.name if len(self.rows) == 1 else f"{self.name}_{split}"


def _whole(name: str, rows: int) -> Task:
    return Task(name, {"all": rows}, {"all": (f"rahulsikder223/SentEval-{name.upper()}", None, "train+test")})


_TREC, _MRPC = "SetFit/TREC-QC", "nyu-mll/glue"
# The hub has no SentEval of its own. These are copies by others; their row order, and so the folds, can
# differ from SentEval's files by chance, which the protocol says through its `data` entry.
_TASKS = (
    _whole("mr", 10662),
    _whole("cr", 3775),
    _whole("subj", 10000),
    _whole("mpqa", 10606),
    Task(
        "sst2",
        {"train": 67349, "dev": 872, "test": 1821},
        {
            "train": ("stanfordnlp/sst2", None, "train"),
            "dev": ("stanfordnlp/sst2", None, "validation"),
            "test": ("SetFit/sst2", None, "test"),  # GLUE's has no labels
        },
    ),
    Task(
        "trec",
        {"train": 5452, "test": 500},
        {"train": (_TREC, None, "train"), "test": (_TREC, None, "test")},
        ("question",),
        "coarse",
        TREC_CLASSES,
        ("label_coarse_original", "text"),
    ),
    # GLUE cuts MRPC's train into train and validation; SentEval uses it whole.
    Task(
        "mrpc",
        {"train": 4076, "test": 1725},
        {"train": (_MRPC, "mrpc", "train+validation"), "test": (_MRPC, "mrpc", "test")},
        _PAIR,
    ),
)
TASKS: dict[str, Task] = {task.name: task for task in _TASKS}


def load_transfer(name: str, data_dir: str | Path | None = None) -> dict[str, Labelled]:
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
        raise UserError("no such transfer task", key="tasks", value=name, fix=one_of(name, SEVEN))
    found = {}
    for split in task.splits:
        path = None if data_dir is None else find_file(data_dir, task.file(split), "transfer")
        hub = Hub(*task.hub[split], "the transfer files (mr.tsv.gz ... mrpc_test.tsv.gz)", task.hub_columns)
        found[split] = _sorted(read_labelled(path, task.texts, task.classes, hub, task.label))
    return found


def source(name: str, data_dir: str | Path | None, splits: Sequence[str] | None = None) -> str:
    """Where `load_transfer` reads a task, or some of its splits."""
    task = TASKS[name]
    if data_dir is not None:
        return ", ".join(str(find_file(data_dir, task.file(s), "transfer")) for s in splits or task.splits)
    return "hub:" + ", ".join(sorted({hub for hub, _, _ in task.hub.values()}))


def _sorted(split: Labelled) -> Labelled:
    sides = [[text.split() for text in side] for side in (split.first, split.second) if side is not None]
    keys = [(*map(len, row), label) for *row, label in zip(*sides, split.labels, strict=True)]
    order = sorted(range(len(split)), key=keys.__getitem__)  # stable: rows that tie keep the file's order
    first, *second = ([" ".join(side[i]) for i in order] for side in sides)
    return Labelled(first, second[0] if second else None, split.labels[order], split.source)
