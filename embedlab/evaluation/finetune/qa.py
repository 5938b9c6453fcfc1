"""Extractive question answering across languages: trained on English questions, scored on XQuAD and MLQA.

Question and passage may be of different languages (G-XLT, generalised cross-lingual transfer): the score of
every pair is a cell of a matrix whose diagonal is XLT.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from embedlab.evaluation.core.correlation import group_means, of_pairs
from embedlab.evaluation.core.settings import folder_of, limit_note, row_limit
from embedlab.evaluation.core.suite import Scored, Settings
from embedlab.evaluation.finetune.answers import scores as answer_scores
from embedlab.evaluation.finetune.config import FineTuneConfig, FineTunedSuite
from embedlab.evaluation.finetune.fit import Learner
from embedlab.evaluation.finetune.models import SpanReader
from embedlab.evaluation.finetune.qa_data import (
    Grid,
    Questions,
    TrainingQuestions,
    grid_limit_note,
    load_grids,
    load_training,
)
from embedlab.evaluation.finetune.windows import (
    Passages,
    best_spans,
    bounds,
    question_tokens,
    read_answers,
    training_spans,
    windows,
)

DEFAULTS = FineTuneConfig(epochs=2, lr=3e-5, batch_size=12, max_length=384, stride=128)
_METRICS = ("f1", "em", "f1_squad", "em_squad")


@dataclass(frozen=True)
class QAData:
    """Questions to train on, and those that are scored, by task."""

    training: TrainingQuestions
    grids: dict[str, Grid]


class QA(FineTunedSuite):
    """Settings: data_dir (folder of retrieval/; None: SQuAD, XQuAD and MLQA test from the
    hub), tasks (xquad, mlqa; default those that are there), languages, train (file stem; default squad_train
    where it is there, else "en"), limit (training rows, and questions of all pairs of languages), finetune.*
    (`FineTuneConfig`), dtype.

    Scores in percent, each as f1, em (MLQA's normalisation) and f1_squad, em_squad (SQuAD's, which XTREME uses
    for XQuAD): "xquad-de-en/f1" (German questions, English passages), the means "xquad-xlt/f1" (question and
    passage of one language) and "xquad-gxlt/f1" (of two languages). The protocol block has the matrices.
    """

    name = "qa"
    folders = ("retrieval",)
    keys = ("tasks", "languages", "train", "limit", "finetune")
    defaults = DEFAULTS

    def load(self, settings: Settings) -> QAData:
        """Training questions and grids."""
        self.config(settings)
        grids = load_grids(settings)
        training = load_training(folder_of(settings, "retrieval"), settings.get("train"), row_limit(settings))
        return QAData(training, grids)

    def score(self, encoder: Any, data: QAData, settings: Settings) -> Scored:
        """Train a reader, and score its answers."""
        config, limit = self.config(settings), row_limit(settings)
        reader = Reader(encoder, config, settings)
        fitted = reader.learn(data.training)
        scores: dict[str, float] = {}
        matrices: dict[str, Any] = {}
        for task, grid in data.grids.items():
            found = {
                pair: answer_scores(answers, grid[pair].answers, pair[0])
                for pair, answers in reader.answers(grid)
            }
            scores |= _task_scores(task, found)
            matrices[task] = {
                metric: {
                    of: {by: round(found[of, by][metric], 2) for o, by in found if o == of} for of, _ in found
                }
                for metric in ("f1", "em")
            }
        return self.result(
            encoder,
            scores,
            name="extractive_qa",
            aggregation="mean over questions; xlt: mean over languages; gxlt: mean over pairs of two languages",
            data={
                "train": {
                    "source": data.training.source,
                    "rows": len(data.training.rows),
                    "dropped": data.training.dropped,
                    "windows": fitted.pop("windows"),
                },
                **{
                    task: {
                        "source": sorted({q.source for q in grid.values()}),
                        "questions": {f"{by}-{of}": len(q) for (of, by), q in grid.items()},
                    }
                    for task, grid in data.grids.items()
                },
            },
            warnings=limit_note(limit) + grid_limit_note(limit, data.grids),
            notes=[
                "f1, em: MLQA's normalisation in the passage's language; *_squad: SQuAD v1.1's",
                "a cell is question language - passage language; the matrices are passage -> question",
                "encoder template and pooling play no part: the head reads the backbone's last layer",
                *(
                    []
                    if "squad" in data.training.source
                    else ["not trained on SQuAD, as published scores are"]
                ),
                *(
                    ["mlqa: its dev set, where published scores are of its test"]
                    if any("mlqa_dev" in q.source for q in data.grids.get("mlqa", {}).values())
                    else []
                ),
            ],
            seed=config.seed,
            matrices=matrices,
            finetune=config.plain() | fitted,
        )


def _task_scores(task: str, found: Mapping[tuple[str, str], Mapping[str, float]]) -> dict[str, float]:
    scores = group_means(found, of_pairs(found, f"{task}-xlt", f"{task}-gxlt"), _METRICS)
    return scores | {f"{task}-{by}-{of}/{m}": each[m] for (of, by), each in found.items() for m in _METRICS}


class Reader(Learner):
    """A span reader on a copy of an encoder's backbone."""

    def __init__(self, encoder: object, config: FineTuneConfig, settings: Mapping[str, Any]) -> None:
        super().__init__(encoder, config, settings, SpanReader)

    def learn(self, training: TrainingQuestions) -> dict[str, Any]:
        """Trains on the windows of `training`; a window without the answer points at its first token.

        Says for the protocol block what the training was.
        """
        texts = list(dict.fromkeys(row.passage for row in training.rows))
        number = {text: i for i, text in enumerate(texts)}
        passages = Passages(self.rows, texts)
        gold, questions, spans = [], [], []
        for row in training.rows:
            span = passages.span(number[row.passage], row.start, row.start + len(row.answer))
            if span is not None:
                gold.append(number[row.passage])
                questions.append(row.question)
                spans.append(span)
        several = windows(self.rows, questions, passages, gold, self.config.stride)
        data = self.buckets([w.row for w in several], span=training_spans(several, spans))
        asked = {"windows": len(several), "question_tokens": question_tokens(self.rows)}
        return asked | self.fit(data, "qa")

    def answers(self, grid: Grid) -> list[tuple[tuple[str, str], list[str]]]:
        """The answers to each cell's questions."""
        passages: dict[tuple[str, int], Passages] = {}
        found = []
        for pair, asked in grid.items():
            # Under a limit, cells of one passage language may have different numbers of passages.
            key = (pair[0], len(asked.passages))
            if key not in passages:
                passages[key] = Passages(self.rows, asked.passages)
            found.append((pair, self.read(asked, passages[key])))
        return found

    def read(self, asked: Questions, passages: Passages) -> list[str]:
        """The answer to each question, a piece of its passage."""
        several = windows(self.rows, asked.questions, passages, asked.gold, self.config.stride)
        data = self.buckets([w.row for w in several], inside=bounds(several))
        best = torch.empty(len(several), device=self.device)
        places = torch.empty(len(several), 2, dtype=torch.int64, device=self.device)
        for batch, output in self.predict(data):
            value, first, last = best_spans(output, batch["inside"])
            best[batch["rows"]] = value
            places[batch["rows"]] = torch.stack([first, last], dim=1)
        places = places.cpu()
        return read_answers(several, best.cpu(), places[:, 0], places[:, 1], passages, asked.gold)
