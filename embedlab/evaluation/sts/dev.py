"""Scoring a development set in the training loop: everything that does not depend on the vectors is done
once."""

from __future__ import annotations

import torch
from torch import Tensor

from embedlab.evaluation.core.correlation import pair_cosine, ranks, standardise
from embedlab.evaluation.core.geometry import (
    POSITIVE_RATING,
    alignment,
    effective_rank,
    mean_cosine,
    uniformity,
)
from embedlab.evaluation.core.protocol import plain_hash
from embedlab.evaluation.core.vectors import unique
from embedlab.evaluation.sts.sts import STSPairs, all_sentences


class DevSet:
    """Rated pairs (usually STS-B dev) ready to score vectors of their distinct sentences.

    Args:
        pairs: to score.
        positive: pairs rated above it are the positive ones of `alignment`.

    Attributes:
        sentences: the distinct sentences, in the order in which `score` wants their vectors.
        metric: the score that selects.
        fingerprint: hex hash of the pairs and their ratings.
    """

    metric = "spearman"

    def __init__(self, pairs: STSPairs, positive: float = POSITIVE_RATING) -> None:
        self.pairs = pairs
        self.sentences, position = unique(all_sentences([pairs]))
        self.fingerprint = plain_hash([pairs.first, pairs.second, pairs.gold.tolist()])
        sides = [[position[s] for s in side] for side in (pairs.first, pairs.second)]
        self._pairs = torch.tensor(sides)  # [2, n_pairs]
        gold = torch.from_numpy(pairs.gold)
        self._gold = standardise(ranks(gold))
        self._positive = self._pairs[:, gold > positive]

    def to(self, device: torch.device | str) -> DevSet:
        """Moves the index tensors to `device`, in place; `score` does it by itself when the vectors live
        elsewhere."""
        self._pairs, self._positive = self._pairs.to(device), self._positive.to(device)
        target = torch.device(device)
        self._gold = self._gold.to(target, torch.float32 if target.type == "mps" else torch.float64)
        return self

    def pair_cosines(self, vectors: Tensor) -> Tensor:
        """Cosine of each rated pair [n_pairs], on the vectors' device, in float64."""
        return pair_cosine(*(vectors[side] for side in self._pairs.to(vectors.device)))

    def score(self, vectors: Tensor, geometry: bool = True, rank: bool = True) -> dict[str, float]:
        """Scores of `vectors` [n_unique, D], row i for `sentences[i]`, on any device and in any float type.

        spearman (x100, ties by average ranks, NaN cosine = 0), mean_cosine (off the diagonal) and, with
        `geometry`, alignment (pairs rated above 4), uniformity and, with `rank` too, effective_rank. Alignment
        and uniformity here are over this set's sentences; the published protocol takes the whole STS-B (suite
        `geometry`), so compare runs with them, not papers. One transfer to the host, at the end.
        """
        if vectors.ndim != 2 or vectors.shape[0] != len(self.sentences):
            raise ValueError(f"vectors of shape {tuple(vectors.shape)} for {len(self.sentences)} sentences")
        vectors = vectors.detach()
        if self._pairs.device != vectors.device:
            self.to(vectors.device)
        cosine = self.pair_cosines(vectors)
        values = {
            "spearman": 100 * (standardise(ranks(cosine)) * self._gold).sum().clamp(-1, 1),
            "mean_cosine": mean_cosine(vectors),
        }
        if geometry:
            values["alignment"] = alignment(*(vectors[side] for side in self._positive))
            # A device waits for its host rather than for n x n products: one piece, where a cache prefers many.
            chunk = 4096 if vectors.device.type == "cuda" else 256
            values["uniformity"] = uniformity(vectors, chunk=chunk)
            if rank:
                values["effective_rank"] = effective_rank(vectors)
        return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))
