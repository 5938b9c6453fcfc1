"""The STS scores of the real files against sentence-transformers' evaluator and mteb's, on the same vectors.

The protocols agree where a task is one set of raw pairs: STS12-16 ("all"), STS-B and SICK-R. mteb's SICK-R is
train, trial and test together, 9,927 pairs, so there the same pairs are scored here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embedlab.evaluation.core.files import find_file, read_tsv
from embedlab.evaluation.core.vectors import Vectors
from embedlab.evaluation.sts.sts import SEVEN, STSPairs, all_sentences, load_sts, score_pairs
from tests.evaluation.helpers import HashedWords
from tests.evaluation.real import needs_data

TOLERANCE = 1e-4  # of a correlation in [-1, 1]


class Words(HashedWords):
    """Each word's vector is drawn once, as the files repeat them often; states a checkpoint for mteb's cache."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__(dim)
        self._known: dict[str, np.ndarray] = {}

    def _vector(self, sentence: str) -> np.ndarray:
        if sentence not in self._known:
            words = sentence.split()
            self._known[sentence] = (
                super()._vector(sentence)
                if len(words) <= 1
                else np.sum([self._vector(word) for word in words], axis=0)
            )
        return self._known[sentence]

    def facts(self, _: object) -> dict[str, Any]:
        return {"checkpoint": "words"}


@pytest.fixture(scope="module")
def encoder() -> Words:
    return Words()


@pytest.fixture(scope="module")
def tasks() -> dict[str, STSPairs]:
    folder = needs_data("sts")
    return {task: load_sts(task, folder) for task in SEVEN}


def ours(encoder: Words, pairs: STSPairs) -> dict[str, float]:
    return {
        name: value / 100
        for name, value in score_pairs(Vectors(encoder, all_sentences([pairs])), pairs).items()
    }


@pytest.mark.parametrize("task", SEVEN)
def test_sentence_transformers(task: str, tasks: dict[str, STSPairs], encoder: Words) -> None:
    evaluation = pytest.importorskip("sentence_transformers.sentence_transformer.evaluation")

    class Model:
        similarity_fn_name = "cosine"

    class Evaluator(evaluation.EmbeddingSimilarityEvaluator):  # type: ignore[misc]
        def embed_inputs(self, model: Model, sentences: Sequence[str], **_: object) -> torch.Tensor:
            return torch.from_numpy(encoder.encode(list(sentences)))

        def store_metrics_in_model_card_data(self, *_: object, **__: object) -> None:
            pass

    pairs = tasks[task]
    theirs = Evaluator(pairs.first, pairs.second, list(pairs.gold), write_csv=False)(Model())
    found = ours(encoder, pairs)
    assert found["spearman"] == pytest.approx(theirs["spearman_cosine"], abs=TOLERANCE)
    assert found["pearson"] == pytest.approx(theirs["pearson_cosine"], abs=TOLERANCE)
    assert found["spearman"] > 0.3, "a score by chance would agree as well"


def test_mteb(
    tasks: dict[str, STSPairs], encoder: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mteb", reason="mteb is not installed (pip install 'embedlab[eval]')")
    from embedlab.evaluation.mteb.mteb import MTEB, resolve_tasks

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    names = {f"sts{year}": f"STS{year}" for year in range(12, 17)} | {
        "stsb": "STSBenchmark",
        "sickr": "SICK-R",
    }
    whole = tasks | {"sickr": _all_of_sick(tasks["sickr"])}
    for task in resolve_tasks(list(names.values())):
        pairs = whole[next(ours for ours, theirs in names.items() if theirs == task.metadata.name)]
        path = tmp_path / task.metadata.dataset["path"] / "test.jsonl"
        path.parent.mkdir(parents=True)
        rows = zip(pairs.first, pairs.second, pairs.gold, strict=True)
        path.write_text(
            "".join(json.dumps({"sentence1": a, "sentence2": b, "score": g}) + "\n" for a, b, g in rows)
        )
    theirs, block = MTEB().run(encoder, {"tasks": list(names.values()), "data_dir": tmp_path})
    assert block["warnings"] == []
    for name, task in names.items():
        expected = ours(encoder, whole[name])["spearman"]
        assert theirs[f"{task}/cosine_spearman"] / 100 == pytest.approx(expected, abs=TOLERANCE), task


def _all_of_sick(test: STSPairs) -> STSPairs:
    folder = needs_data("sts")
    parts = [
        read_tsv(find_file(folder, f"sick_{split}"), ["sentence1", "sentence2", "relatedness"])
        for split in ("train", "trial", "test")
    ]
    first, second, gold = (
        [cell for part in parts for cell in part[name]] for name in ("sentence1", "sentence2", "relatedness")
    )
    assert len(gold) == 9927
    return replace(test, first=first, second=second, gold=np.array(gold, dtype=np.float64), expected=9927)
