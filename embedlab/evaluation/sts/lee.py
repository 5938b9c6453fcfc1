"""Correlation with the Lee documents' human similarity ratings: 50 short news texts, all 1,225 pairs rated.

Lee, Pincombe & Welsh (CogSci 2005), as shipped in gensim's test data. It needs no hub, and it is small: so
every score comes with a bootstrap interval over documents (pairs share documents and are not independent).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata

from embedlab.errors import UserError
from embedlab.evaluation.core.geometry import geometry_metrics, summary, unit
from embedlab.evaluation.core.settings import whole
from embedlab.evaluation.core.suite import Scored, Settings, Suite
from embedlab.evaluation.core.table import Metric
from embedlab.evaluation.core.vectors import Encoder, embed
from embedlab.evaluation.sts.compare import change_interval

RESAMPLES = 1000
SEED = 0
_DOCUMENTS = 50
_METRICS = ("spearman", "pearson")


@dataclass(frozen=True)
class LeeSet:
    """documents: 50 texts; human: symmetric [50, 50] mean ratings in [0, 1]."""

    documents: list[str]
    human: NDArray[np.float64]


def load_lee(folder: str | Path | None = None) -> LeeSet:
    """The documents and ratings from the installed gensim (or a folder with lee.cor and similarities0-1.txt).

    gensim itself is not imported. UserError when it is not installed.
    """
    if folder is None:
        spec = importlib.util.find_spec("gensim")
        if spec is None or not spec.submodule_search_locations:
            raise UserError(
                "the Lee documents come with gensim, which is not installed", fix="pip install gensim"
            )
        folder = Path(spec.submodule_search_locations[0]) / "test" / "test_data"
    texts, ratings = Path(folder) / "lee.cor", Path(folder) / "similarities0-1.txt"
    for path in (texts, ratings):
        if not path.is_file():
            raise UserError("is missing", file=path, fix="pip install gensim with its test data")
    # The file is Latin-1: its one byte beyond ASCII is a pound sign.
    documents = [line.strip() for line in texts.read_text(encoding="latin-1").split("\n") if line.strip()]
    upper = np.triu(np.loadtxt(ratings), k=1)
    if len(documents) != _DOCUMENTS or upper.shape != (_DOCUMENTS, _DOCUMENTS):
        raise UserError(
            f"has {len(documents)} documents instead of {_DOCUMENTS}", file=texts, fix="reinstall gensim"
        )
    return LeeSet(documents, upper + upper.T)


def _correlation(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    x, y = x - x.mean(), y - y.mean()
    length = float(np.linalg.norm(x) * np.linalg.norm(y))
    return float(x @ y) / length if length > 1e-12 else 0.0


def _correlations(cosine: NDArray[np.float64], human: NDArray[np.float64]) -> tuple[float, float]:
    return _correlation(rankdata(cosine), rankdata(human)), _correlation(cosine, human)


def _bootstrap(
    cosines: Sequence[NDArray[np.float64]], human: NDArray[np.float64], resamples: int, seed: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Spearman and Pearson of encoders given by their cosines, on the whole set [encoders, 2] and on bootstrap
    samples of documents [encoders, resamples, 2], which are the same for all.

    A pair of a document with itself is left out: its similarity of 1 is no judgement.
    """
    upper = np.triu_indices(len(human), k=1)
    generator = np.random.default_rng(seed)
    found = np.empty((len(cosines), resamples, 2))
    for i in range(resamples):
        drawn = generator.integers(0, len(human), size=len(human))
        pair = drawn[upper[0]], drawn[upper[1]]
        pair = tuple(side[pair[0] != pair[1]] for side in pair)
        found[:, i] = [_correlations(cosine[pair], human[pair]) for cosine in cosines]
    return np.array([_correlations(cosine[upper], human[upper]) for cosine in cosines]), found


def _cosines(vectors: torch.Tensor) -> NDArray[np.float64]:
    x = unit(vectors.cpu())
    # Rounded: identical vectors must tie, however the product was summed.
    return np.asarray((x @ x.T).nan_to_num(nan=0.0).numpy().round(12), dtype=np.float64)


def score(
    vectors: torch.Tensor, lee: LeeSet, resamples: int = RESAMPLES, seed: int = SEED, level: float = 0.95
) -> dict[str, float]:
    """Spearman and Pearson (x100) of cosine against the human ratings over all pairs of `vectors` [50, D],
    each with the bootstrap interval: spearman, spearman_low, spearman_high, pearson, pearson_low,
    pearson_high."""
    (point,), (samples,) = _bootstrap([_cosines(vectors)], lee.human, resamples, seed)
    low, high = np.quantile(samples, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return {
        f"{name}{end}": 100 * float(values[i])
        for i, name in enumerate(_METRICS)
        for end, values in (("", point), ("_low", low), ("_high", high))
    }


def compare(
    before: torch.Tensor,
    after: torch.Tensor,
    lee: LeeSet,
    resamples: int = RESAMPLES,
    seed: int = SEED,
    level: float = 0.95,
) -> dict[str, float]:
    """Paired bootstrap of `after` minus `before` (vectors [50, D] of two encoders), x100: spearman_change
    with its interval spearman_change_low / _high, and spearman_worse, the share of samples in which `after`
    is lower; the same for pearson."""
    points, samples = _bootstrap([_cosines(before), _cosines(after)], lee.human, resamples, seed)
    change = 100 * (samples[1] - samples[0])
    result: dict[str, float] = {}
    for i, name in enumerate(_METRICS):
        result |= change_interval(f"{name}_", 100 * float(points[1, i] - points[0, i]), change[:, i], level)
    return result


class Lee(Suite):
    """Correlations with their intervals, and the geometry of the 50 documents. Settings: resamples."""

    name = "lee"
    keys = ("resamples",)
    packages: ClassVar = {"gensim": "gensim"}
    optional = True
    metrics = (
        Metric("lee/spearman", "Lee human similarity, Spearman", "higher"),
        Metric("lee/pearson", "Lee human similarity, Pearson", "higher"),
        *geometry_metrics("lee"),
    )
    quantities = metrics

    def load(self, settings: Settings) -> LeeSet:
        """The documents and their ratings."""
        whole(settings, "resamples", RESAMPLES)
        return load_lee()

    def score(self, encoder: Encoder, data: LeeSet, settings: Settings) -> Scored:
        """ "lee/spearman" and so on."""
        resamples = whole(settings, "resamples", RESAMPLES)
        vectors = embed(encoder, data.documents)
        found = score(vectors, data, resamples) | summary(vectors)
        scores = {f"lee/{name}": value for name, value in found.items()}
        return self.result(
            encoder,
            scores,
            name="lee_cosine_human",
            aggregation=f"all 1,225 pairs; 95% interval: {resamples} bootstrap samples over documents",
            sentences=data.documents,
            data={"lee": {"source": "gensim", "documents": len(data.documents)}},
            seed=SEED,
        )
