"""What notebooks ask of an encoder: its vectors layer by layer, and how cosines follow human ratings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from embedlab.evaluation.core.correlation import pair_cosine, spearman
from embedlab.evaluation.core.ratings import RatedCosines
from embedlab.evaluation.core.vectors import Encoder, Vectors, unique
from embedlab.evaluation.sts.sts import STSPairs

if TYPE_CHECKING:
    from embedlab.encoders.encoder import SentenceEncoder

Array = NDArray[np.float64]


def rated_cosines(encoder: Encoder, pairs: STSPairs) -> RatedCosines:
    """Cosines of rated pairs.

    Args:
        encoder: to ask; it encodes each distinct sentence once.
        pairs: with their ratings.

    Returns: cosines ``[n]`` beside the ratings ``[n]``.
    """
    vectors = Vectors(encoder, [*pairs.first, *pairs.second])
    return RatedCosines(vectors.cosine(pairs.first, pairs.second).numpy(), pairs.gold)


def layer_scores(encoder: SentenceEncoder, pairs: STSPairs, batch: int = 64) -> list[float]:
    """Spearman x100 of the mean over each layer's tokens, from the embeddings (0) to the last block.

    A probe without training: where in the network sentence similarity can be read.

    Args:
        encoder: with one backbone, which is asked for all its layers.
        pairs: with their ratings.
        batch: sentences at a time.

    Returns: Spearman x100, one for each of the layers + 1.
    """
    texts, position = unique([*pairs.first, *pairs.second])
    rows = encoder.tokenization.ids(texts)
    layers: list[list[torch.Tensor]] = []
    with encoder.evaluating(None):
        for start in range(0, len(rows), batch):
            padded = encoder.tokenization.pad(rows[start : start + batch])
            ids, mask = (padded[name].to(encoder.device) for name in ("input_ids", "attention_mask"))
            hidden = encoder.backbone(ids, mask, all_layers=True)
            weight = mask.unsqueeze(-1).float()
            layers = layers or [[] for _ in hidden]
            for kept, states in zip(layers, hidden, strict=True):
                kept.append(((states.float() * weight).sum(1) / weight.sum(1).clamp(min=1)).cpu())
    first, second = ([position[t] for t in side] for side in (pairs.first, pairs.second))
    gold = torch.as_tensor(pairs.gold)
    found = []
    for kept in layers:
        vectors = torch.cat(kept)
        found.append(100 * float(spearman(pair_cosine(vectors[first], vectors[second]), gold)))
    return found
