"""Cross-lingual retrieval: a question in one language looks for its passage in another (XQuAD, MLQA).

For every two languages the candidates are the passages of one language. With XQuAD, whose passages are the
same in all languages, also all passages of all languages at once ("pooled", as LAReQA does): there an encoder
that prefers passages in the question's language is not helped, since any translation of the right one counts.
"""

from __future__ import annotations

from statistics import fmean

import torch
from torch import Tensor

from embedlab.evaluation.core.correlation import flat, group_means, of_pairs
from embedlab.evaluation.core.nearest import TopK, unit
from embedlab.evaluation.core.settings import row_limit, scoring_device
from embedlab.evaluation.core.suite import Scored, Settings, Suite
from embedlab.evaluation.core.vectors import Encoder, Prompted, Vectors, embed
from embedlab.evaluation.finetune.qa_data import Grid, grid_limit_note, load_grids

_DEPTH = 10


def accuracy_and_mrr(queries: Tensor, documents: Tensor, gold: Tensor) -> dict[str, float]:
    """Percent of queries whose nearest document is theirs, and mean reciprocal rank x100 within the first 10.

    queries [q, D], documents [n, D] (cosine); gold [q]: row of the right document.
    """
    top = TopK(unit(queries), _DEPTH)
    top.add(unit(documents))
    hit = top.rows == gold.to(top.rows.device)[:, None]
    ranks = torch.arange(1, hit.shape[1] + 1, device=hit.device)
    return {
        "accuracy": 100 * float(hit[:, 0].float().mean()),
        "mrr@10": 100 * float((hit / ranks).sum(dim=1).mean()),
    }


class CrossRetrieval(Suite):
    """Settings: data_dir (folder of retrieval/; None: the hub), tasks (xquad, mlqa;
    default those that are there), languages, limit (questions of all pairs of languages, and
    passages of all languages), query_prompt and corpus_prompt (before each text; default: the encoder's own prompts),
    device.

    Scores: "xquad-de-en/accuracy" (German questions, English passages), means over pairs
    "xquad-same/accuracy" (question and passage in one language), "xquad-cross/accuracy" (in two), and, where the files
    of passages have the same rows, "xquad-pooled/accuracy".
    """

    name = "xretrieval"
    folders = ("retrieval",)
    keys = ("tasks", "languages", "limit", "query_prompt", "corpus_prompt")

    def load(self, settings: Settings) -> dict[str, Grid]:
        """Questions and passages by task."""
        return load_grids(settings)

    def score(self, encoder: Encoder, data: dict[str, Grid], settings: Settings) -> Scored:
        """Accuracy and mean reciprocal rank of each pair of languages."""
        limit = row_limit(settings)
        asking = Prompted(encoder, "query", settings.get("query_prompt"))
        answering = Prompted(encoder, "document", settings.get("corpus_prompt"))
        place = scoring_device(settings.get("device"))
        scores: dict[str, float] = {}
        for task, grid in data.items():
            scores |= _scores(asking, answering, task, grid, place)
        return self.result(
            encoder,
            scores,
            name="question_to_passage",
            aggregation="mean over questions of a pair of languages; mean over pairs",
            sentences=[
                answering.text + text for grid in data.values() for q in grid.values() for text in q.passages
            ],
            data={
                task: {
                    "source": sorted({q.source for q in grid.values()}),
                    "questions": {f"{asked}-{of}": len(q) for (of, asked), q in grid.items()},
                    "passages": {q.passage_language: len(q.passages) for q in grid.values()},
                }
                for task, grid in data.items()
            },
            warnings=grid_limit_note(limit, data),
            prompts={"query": asking.text, "corpus": answering.text},
        )


def _same_rows(grid: Grid) -> bool:
    """Whether the passages are row by row the same in each language, as XQuAD's are and MLQA's are not: then a question
    has its passage in one row of all."""
    places: dict[str, list[int]] = {}
    aligned = all(places.setdefault(by, q.gold) == q.gold for (_, by), q in grid.items())
    return aligned and len({len(q.passages) for q in grid.values()}) == 1


def _scores(asking: Encoder, answering: Encoder, task: str, grid: Grid, place: str) -> dict[str, float]:
    passages: dict[str, list[str]] = {}
    for q in grid.values():
        # A limit leaves some pairs of languages fewer passages than others.
        if len(q.passages) > len(passages.get(q.passage_language, ())):
            passages[q.passage_language] = list(q.passages)
    documents = {name: embed(answering, texts).to(place) for name, texts in passages.items()}
    asked = {pair: list(q.questions) for pair, q in grid.items()}
    vectors = Vectors(asking, [text for several in asked.values() for text in several])
    queries = {pair: vectors.take(several).to(place) for pair, several in asked.items()}
    found, pooled = {}, []
    everything = torch.cat(list(documents.values())) if task == "xquad" and _same_rows(grid) else None
    for (of, by), q in grid.items():
        gold = torch.tensor(q.gold, device=place)
        found[of, by] = accuracy_and_mrr(queries[of, by], documents[of], gold)
        if everything is not None and of == by:
            top = TopK(unit(queries[of, by]), 1)
            top.add(unit(everything))
            pooled.append(100 * float((top.rows[:, 0] % len(q.passages) == gold).float().mean()))
    scores = group_means(found, of_pairs(found, f"{task}-same", f"{task}-cross"), ("accuracy", "mrr@10"))
    if pooled:
        scores[f"{task}-pooled/accuracy"] = fmean(pooled)
    return scores | flat({f"{by}-{of}": each for (of, by), each in found.items()}, f"{task}-")
