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
    """Each distinct sentence is encoded once."""
    vectors = Vectors(encoder, [*pairs.first, *pairs.second])
    return RatedCosines(vectors.cosine(pairs.first, pairs.second).numpy(), pairs.gold)


@torch.no_grad()
def layer_scores(encoder: SentenceEncoder, pairs: STSPairs, batch: int = 64) -> list[float]:
    """Spearman x100 of the mean over each layer's tokens, from the embeddings (0) to the last block.

    A probe without training: where in the network sentence similarity can be read.
    """
    was = encoder.training
    encoder.eval()
    texts, position = unique([*pairs.first, *pairs.second])
    rows = encoder.tokenization.ids(texts)
    layers: list[list[torch.Tensor]] = []
    for start in range(0, len(rows), batch):
        tokens = {
            k: v.to(encoder.device) for k, v in encoder.tokenization.pad(rows[start : start + batch]).items()
        }
        hidden = encoder.backbone(tokens["input_ids"], tokens["attention_mask"], all_layers=True)
        mask = tokens["attention_mask"].unsqueeze(-1).float()
        layers = layers or [[] for _ in hidden]
        for kept, states in zip(layers, hidden, strict=True):
            kept.append(((states.float() * mask).sum(1) / mask.sum(1).clamp(min=1)).cpu())
    encoder.train(was)
    first, second = ([position[t] for t in side] for side in (pairs.first, pairs.second))
    gold = torch.as_tensor(pairs.gold)
    found = []
    for kept in layers:
        vectors = torch.cat(kept)
        found.append(100 * float(spearman(pair_cosine(vectors[first], vectors[second]), gold)))
    return found
