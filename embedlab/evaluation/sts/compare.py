"""Is one encoder better than another on the same sentence pairs? A paired bootstrap over the pairs.

The interval is that of the test set's pairs for two given encoders. It says nothing of the spread over training
seeds, which `embedlab report` shows, and which is the larger one for unsupervised SimCSE.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from embedlab.evaluation.core import protocol as protocols
from embedlab.evaluation.core.settings import whole
from embedlab.evaluation.core.table import Table
from embedlab.evaluation.core.vectors import Encoder, Vectors
from embedlab.evaluation.sts.sts import SEVEN, STSPairs, all_sentences, load_tasks

RESAMPLES, SEED, LEVEL = 1000, 0, 0.95
_CHUNK = 50  # resamples ranked at a time: bounds the memory


def spearman_rows(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Spearman's correlation (average ranks, x100) of each row of ``x`` with that of ``y``: ``[R, n]`` -> ``[R]``."""
    a, b = (rankdata(v, axis=1) for v in (x, y))
    a -= a.mean(1, keepdims=True)
    b -= b.mean(1, keepdims=True)
    scale = np.sqrt((a * a).sum(1) * (b * b).sum(1))
    return 100 * np.divide((a * b).sum(1), scale, out=np.zeros(len(a)), where=scale > 0)


def bootstrap(
    gold: NDArray[np.float64],
    first: NDArray[np.float64],
    second: NDArray[np.float64],
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> NDArray[np.float64]:
    """Differences ``second - first`` of Spearman x100 on resampled pairs: three ``[n]`` -> ``[resamples]``.

    Both encoders get the same pairs in each resample, so what makes a pair easy for both cancels out.
    """
    draw = np.random.default_rng(seed)
    found = []
    for start in range(0, resamples, _CHUNK):
        rows = draw.integers(len(gold), size=(min(_CHUNK, resamples - start), len(gold)))
        found.append(spearman_rows(second[rows], gold[rows]) - spearman_rows(first[rows], gold[rows]))
    return np.concatenate(found)


def compare_sts(
    first: Encoder,
    second: Encoder,
    tasks: Sequence[STSPairs],
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> dict[str, float]:
    """``second`` minus ``first`` on STS tasks, each and their mean ("sts" and, with the seven, "sts7").

    Returns:
        ``task/change`` (Spearman x100, on all pairs), its interval ``task/change_low`` and ``task/change_high``
        (95 %), and ``task/worse``, the share of resamples in which ``second`` is lower.
    """
    vectors = [Vectors(encoder, all_sentences(tasks)) for encoder in (first, second)]
    scores: dict[str, float] = {}
    points, samples = [], []
    for number, pairs in enumerate(tasks):
        gold = pairs.gold
        one, other = (v.cosine(pairs.first, pairs.second).numpy() for v in vectors)
        before, after = (float(spearman_rows(c[None], gold[None])[0]) for c in (one, other))
        points.append(after - before)
        samples.append(bootstrap(gold, one, other, resamples=resamples, seed=seed + number))
        scores |= change_interval(f"{pairs.task}/", points[-1], samples[-1])
    if len(tasks) > 1:
        name = "sts7" if {p.task for p in tasks} == set(SEVEN) else "sts"
        scores |= change_interval(f"{name}/", float(np.mean(points)), np.mean(samples, axis=0))
    return scores


def change_interval(
    prefix: str, point: float, samples: NDArray[np.float64], level: float = LEVEL
) -> dict[str, float]:
    """A difference with its bootstrap interval.

    Args:
        prefix: of the names.
        point: the difference on the whole set.
        samples: it on each sample, ``[resamples]``.
        level: share of the samples in the interval.

    Returns: ``change``, ``change_low``, ``change_high``, and ``worse``, the share of negative samples.
    """
    low, high = np.quantile(samples, [(1 - level) / 2, (1 + level) / 2])
    return {
        f"{prefix}change": point,
        f"{prefix}change_low": float(low),
        f"{prefix}change_high": float(high),
        f"{prefix}worse": float((samples < 0).mean()),
    }


class Comparison:
    """Two encoders on STS. Settings: those of the suite ``sts``, and ``resamples``."""

    keys = ("resamples",)

    def load(self, settings: Mapping[str, Any]) -> list[STSPairs]:
        """The tasks.

        Raises:
            UserError: a wrong setting, a missing or broken file.
        """
        whole(settings, "resamples", RESAMPLES)
        return load_tasks(settings)

    def score(
        self, first: Encoder, second: Encoder, tasks: list[STSPairs], settings: Mapping[str, Any]
    ) -> tuple[dict[str, float], dict[str, Any]]:
        """``second`` minus ``first``, as of `compare_sts`, and the protocol block."""
        resamples = whole(settings, "resamples", RESAMPLES)
        block = protocols.describe(
            second,
            suite="compare",
            name="sts_paired_bootstrap",
            aggregation=f"all; {resamples} resamples of sentence pairs, the same for both encoders; 95 % interval",
            text=tasks[0].text,
            sentences=all_sentences(tasks),
            data={pairs.task: pairs.counts() for pairs in tasks},
            seed=SEED,
            against=protocols.encoder_facts(first),
            notes=[
                "The interval is over the pairs of the test sets, for these two encoders; seeds are another matter.",
                *(note for pairs in tasks for note in pairs.notes),
            ],
        )
        return compare_sts(first, second, tasks, resamples), block

    def table(self, names: tuple[str, str], changes: Mapping[str, float], note: str) -> Table:
        """One row a task; names of ``second`` and ``first``."""
        rows = tuple(
            (task, f"{changes[f'{task}/change']:+.2f}",
             f"[{changes[f'{task}/change_low']:+.2f}, {changes[f'{task}/change_high']:+.2f}]")
            for task in dict.fromkeys(key.split("/")[0] for key in changes)
        )  # fmt: skip
        title = f"{names[0]} minus {names[1]}, Spearman x100"
        return Table(title, ("task", "change", "95 % over pairs"), rows, note)
