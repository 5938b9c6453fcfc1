"""Bitext retrieval: is a sentence's translation its nearest neighbour in the other language (accuracy@1)."""

from __future__ import annotations

from pathlib import Path

import torch
from numpy.typing import NDArray
from torch import Tensor

from embedlab.evaluation.bitext.parallel_texts import NTREX, XTREME, Bitext, parallel_table, tatoeba
from embedlab.evaluation.core.correlation import flat, group_means
from embedlab.evaluation.core.files import is_there
from embedlab.evaluation.core.nearest import unit
from embedlab.evaluation.core.settings import chosen, folder_of, limit_note, names, row_limit, scoring_device
from embedlab.evaluation.core.suite import Scored, Settings, Suite
from embedlab.evaluation.core.table import Metric
from embedlab.evaluation.core.vectors import Encoder, Vectors

_SCORES_AT_ONCE = 1 << 24  # floats of one [block, n] score matrix: 64 MiB


def bitext_accuracy(source: Tensor | NDArray, target: Tensor | NDArray) -> dict[str, float]:
    """Accuracy@1 in percent by cosine, row i of `source` [n, D] being the translation of row i of `target`.

    forward: each source row looks for its target among all n targets; backward: the other way; mean: of both.
    Of equal cosines the first row wins, so an encoder that says the same of everything scores 100 / n.

    Raises ValueError for empty input or sides of different shapes.
    """
    x, y = (unit(torch.as_tensor(side)).nan_to_num(nan=0.0) for side in (source, target))
    if x.shape != y.shape or x.dim() != 2 or len(x) == 0:
        raise ValueError(
            f"source {tuple(x.shape)} and target {tuple(y.shape)}: two equal shapes [n, D], n > 0"
        )
    y = y.to(x.device)
    forward, backward = _hits(x, y), _hits(y, x)
    return {"forward": forward, "backward": backward, "mean": (forward + backward) / 2}


def _hits(queries: Tensor, documents: Tensor) -> float:
    n = len(queries)
    rows = torch.arange(n, device=queries.device)
    step = max(1, _SCORES_AT_ONCE // n)
    found = [_first_best(block @ documents.T) for block in queries.split(step)]
    return 100 * float((torch.cat(found) == rows).sum()) / n


def _first_best(scores: Tensor) -> Tensor:
    # argmax names any of several equal maxima, another one by device; rounding makes twins of one text equal.
    best = scores.amax(dim=1, keepdim=True)
    return (scores >= best - 1e-6).to(torch.uint8).argmax(dim=1)


TASKS = ("tatoeba", "ntrex")
DIRECTIONS = ("forward", "backward", "mean")


class BitextRetrieval(Suite):
    """Each language against English.

    Settings: data_dir (folder of parallel/; None: Tatoeba from the hub), tasks (tatoeba, ntrex; default those
    that are there), languages (codes of one task), limit (pairs a language: also the number of candidates),
    device.

    Scores in percent: "tatoeba-deu/forward" (German sentences looking for their English one), "/backward",
    "/mean", and over languages "tatoeba/forward", ..., "tatoeba36/mean" (those of XTREME's 36 languages that
    are there) and "ntrex/mean".
    """

    name = "bitext"
    folders = ("parallel",)
    keys = ("tasks", "languages", "limit")
    metrics = (
        Metric("tatoeba36/mean", "Tatoeba accuracy@1, XTREME's languages", "higher"),
        Metric("ntrex/mean", "NTREX accuracy@1", "higher"),
    )

    def load(self, settings: Settings) -> dict[str, list[Bitext]]:
        """Translations by task."""
        folder, limit = folder_of(settings, "parallel"), row_limit(settings)
        languages = names(settings, "languages")
        tasks = chosen(names(settings, "tasks"), TASKS, "tasks")
        if settings.get("tasks") is None and not (folder and is_there(folder, NTREX)):
            tasks = ["tatoeba"]
        pairs: dict[str, list[Bitext]] = {}
        for task in tasks:
            if task == "tatoeba":
                pairs[task] = tatoeba(folder, languages, limit)
            else:
                asked = None if languages is None else [*languages, "eng"]
                pairs[task] = parallel_table(folder, NTREX, asked, limit).with_pivot("eng")
        return pairs

    def score(self, encoder: Encoder, data: dict[str, list[Bitext]], settings: Settings) -> Scored:
        """Accuracy@1 of each language."""
        limit = row_limit(settings)
        every = [text for several in data.values() for p in several for text in (*p.first, *p.second)]
        vectors = Vectors(encoder, every)
        vectors.matrix = vectors.matrix.to(scoring_device(settings.get("device")))
        scores: dict[str, float] = {}
        for task, several in data.items():
            found = {
                p.language: bitext_accuracy(vectors.take(p.first), vectors.take(p.second)) for p in several
            }
            groups = {task: list(found)}
            if task == "tatoeba":
                groups["tatoeba36"] = [language for language in found if language in XTREME]
            scores |= group_means(found, groups, DIRECTIONS)
            scores |= flat(found, f"{task}-")
        return self.result(
            encoder,
            scores,
            name="bitext_accuracy_at_1",
            aggregation="cosine, nearest of the other language's sentences; mean over languages",
            sentences=vectors.sentences,
            data={
                task: {
                    "source": _common_source(several),
                    "languages": len(several),
                    "pairs": {p.language: len(p) for p in several},
                    **({"dropped": several[0].dropped} if several[0].dropped else {}),
                }
                for task, several in data.items()
            },
            warnings=limit_note(limit),
            notes=[
                f"tatoeba36: {sum(p.language in XTREME for p in data['tatoeba'])} of XTREME's 36 languages"
            ]
            if "tatoeba" in data
            else [],
        )


def _common_source(several: list[Bitext]) -> str:
    sources = list(dict.fromkeys(p.source for p in several))
    return sources[0] if len(sources) == 1 else str(Path(sources[0]).parent)
