"""Whether a sentence of a news story is nearest to another of the same story: Lee's documents, sentence by sentence.

350 short stories of gensim's test data and their 2,700 sentences: enough of them that a change of some points shows
beside its interval, where the 50 rated documents of `embedlab.evaluation.sts.lee` leave it open. It needs no hub.
"""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from embedlab.data.packages import lee_sentences
from embedlab.evaluation.core.geometry import unit
from embedlab.evaluation.core.settings import whole
from embedlab.evaluation.core.suite import Scored, Settings, Suite
from embedlab.evaluation.core.table import Metric
from embedlab.evaluation.core.vectors import Encoder, embed
from embedlab.evaluation.sts.lee import RESAMPLES, SEED

Data = tuple[list[str], NDArray[np.int64]]
"""Sentences, and the number of each one's story [n]."""


def stories() -> Data:
    """Sentences that stand once in the documents, of stories that have another one."""
    rows = list(lee_sentences())
    repeats = Counter(text for text, _ in rows)
    once = [(text, story) for text, story in rows if repeats[text] == 1]
    sizes = Counter(story for _, story in once)
    kept = [(text, story) for text, story in once if sizes[story] > 1]
    return [text for text, _ in kept], np.array([story for _, story in kept])


def hits(vectors: torch.Tensor, story: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether each of the vectors [n, D] has its nearest other one, by cosine, in its own story: [n]."""
    x = unit(vectors.cpu())
    near = (x @ x.T).fill_diagonal_(-torch.inf).argmax(1).numpy()
    return np.asarray(story[near] == story)


def accuracy(
    hit: NDArray[np.bool_], story: NDArray[np.int64], resamples: int, seed: int = SEED
) -> dict[str, float]:
    """Share of `hit` x100, with a bootstrap interval (95 %) over stories, whose sentences are not independent."""
    _, place = np.unique(story, return_inverse=True)
    right, count = np.bincount(place, hit), np.bincount(place)
    drawn = np.random.default_rng(seed).integers(0, len(count), (resamples, len(count)))
    shares = 100 * right[drawn].sum(1) / count[drawn].sum(1)
    low, high = np.quantile(shares, [0.025, 0.975])
    return {"accuracy": 100 * float(hit.mean()), "accuracy_low": float(low), "accuracy_high": float(high)}


class Stories(Suite):
    """Accuracy@1 in percent, "stories/accuracy", with its interval. Settings: resamples."""

    name = "stories"
    keys = ("resamples",)
    packages: ClassVar = {"gensim": "gensim"}
    optional = True
    metrics = (Metric("stories/accuracy", "nearest sentence is of the same news story", "higher"),)
    quantities = metrics

    def load(self, settings: Settings) -> Data:
        """The sentences and their stories."""
        whole(settings, "resamples", RESAMPLES)
        return stories()

    def score(self, encoder: Encoder, data: Data, settings: Settings) -> Scored:
        """The accuracy."""
        texts, story = data
        resamples = whole(settings, "resamples", RESAMPLES)
        found = accuracy(hits(embed(encoder, texts), story), story, resamples)
        return self.result(
            encoder,
            {f"stories/{name}": value for name, value in found.items()},
            name="lee_stories_accuracy_at_1",
            aggregation=f"cosine, nearest other sentence; 95% interval: {resamples} bootstrap samples over stories",
            sentences=texts,
            data={"lee": {"source": "gensim", "stories": len(set(story.tolist())), "sentences": len(texts)}},
            seed=SEED,
        )
