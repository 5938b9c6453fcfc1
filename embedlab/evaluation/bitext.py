"""Bitext retrieval: is a sentence's translation its nearest neighbour in the other language (accuracy@1)."""

from __future__ import annotations

import torch
from numpy.typing import NDArray
from torch import Tensor

from embedlab.evaluation.nearest import unit

_SCORES_AT_ONCE = 1 << 24  # floats of one [block, n] score matrix: 64 MiB


def bitext_accuracy(source: Tensor | NDArray, target: Tensor | NDArray) -> dict[str, float]:
    """Accuracy@1 in percent by cosine, row i of `source` [n, D] being the translation of row i of `target`.

    forward: each source row looks for its target among all n targets; backward: the other way; mean: of both.
    Of equal cosines the first row wins, so an encoder that says the same of everything scores 100 / n.

    Raises ValueError for empty input or sides of different shapes.
    """
    x, y = unit(torch.as_tensor(source)), unit(torch.as_tensor(target))
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
