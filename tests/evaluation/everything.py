"""A folder of every kind of evaluation data, small, in the layout of the real ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from embedlab.evaluation.transfer.transfer_data import TASKS
from tests.evaluation.finetune.test_suites import write_nli
from tests.evaluation.helpers import write_sts_folder, write_tsv
from tests.evaluation.multilingual import write_parallel, write_xquad

GOOD = ["fine", "great", "lovely", "superb", "warm"]
BAD = ["awful", "dull", "bad", "poor", "cold"]


def every_kind(folder: Path) -> Path:
    """sts/, sts_multilingual/, transfer/, glue/, nli/, parallel/ and retrieval/, for the defaults of every suite."""
    for name in ("sts_multilingual", "glue"):
        (folder / name).mkdir(parents=True)
    write_sts_folder(folder / "sts")
    write_transfer(folder / "transfer")
    write_parallel(folder / "parallel")
    write_nli(folder / "nli")
    pairs = [(i % 2, f"the cat {i}", f"a dog {i}") for i in range(8)]
    header = ["label", "sentence1", "sentence2"]
    write_tsv(folder / "nli" / "pawsx_dev_en.tsv", header, pairs)
    rated = [(i / 8, f"die Katze {i}", f"ein Hund {i}") for i in range(40)]
    for name in ("stsb_mt_de_test", "stsb_test"):
        write_tsv(folder / "sts_multilingual" / f"{name}.tsv", ["score", *header[1:]], rated)
    collection(folder / "retrieval" / "few")
    write_xquad(folder / "retrieval")
    (folder / "retrieval" / "tydiqa_goldp_train").mkdir()
    asked = [("which place 1", "a town called place1", "place1")]
    write_tsv(
        folder / "retrieval" / "tydiqa_goldp_train" / "en.tsv", ["question", "passage", "answer"], asked
    )
    for split in ("train", "dev"):
        write_tsv(folder / "glue" / f"cola_{split}.tsv", ["label", "sentence"], [(1, "a cat"), (0, "cat a")])
        entailed = [("entailment", "a cat", "cat"), ("not_entailment", "a cat", "dog")]
        write_tsv(folder / "glue" / f"rte_{split}.tsv", ["label", "premise", "hypothesis"], entailed)
    return folder


def collection(folder: Path) -> Path:
    """One query and its document, in BEIR's layout."""
    folder.mkdir(parents=True)
    (folder / "corpus.jsonl").write_text(json.dumps({"_id": "d", "title": "", "text": "a cat"}) + "\n")
    (folder / "queries.jsonl").write_text(json.dumps({"_id": "q", "text": "cat"}) + "\n")
    (folder / "qrels").mkdir()
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq\td\t1\n")
    return folder


def sentence(words: Sequence[str], rng: np.random.Generator) -> str:
    return " ".join(rng.choice(words, size=int(rng.integers(3, 8))))


def write_transfer(folder: Path) -> Path:
    """All seven tasks, 72 rows a split, in the layout of the real files; one word list a label."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    words = [GOOD, BAD, ["who", "person"], ["where", "city"], ["when", "number"], ["what", "thing"]]
    for task in TASKS.values():
        for split in task.splits:
            rows = []
            for i in range(72):
                label = i % len(task.classes)
                texts = [sentence(words[label], rng) for _ in task.texts]
                if len(texts) == 2 and label == 1:
                    texts[1] = texts[0]
                rows.append([task.classes[label], *texts])
            write_tsv(folder / f"{task.file(split)}.tsv.gz", [task.label, *task.texts], rows)
    return folder
