"""What notebooks ask of an encoder: its vectors layer by layer, and how cosines follow human ratings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from embedlab.errors import UserError
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
    cosine = pair_cosine(vectors.take(pairs.first), vectors.take(pairs.second))
    return RatedCosines(cosine.double().numpy(), np.asarray(pairs.gold, dtype=np.float64))


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


def project(vectors: Array, how: str = "tsne", seed: int = 42) -> Array:
    """Two coordinates of each vector, ``[n, D]`` -> ``[n, 2]``, by t-SNE or UMAP on the first 50 components.

    The papers' setting: perplexity 30 (less where there are few vectors), fixed seed.

    Raises UserError for another name, and where UMAP is not installed.
    """
    from sklearn.decomposition import PCA

    n, width = vectors.shape
    reduced = PCA(min(50, n, width), random_state=seed).fit_transform(vectors)
    if how == "tsne":
        from sklearn.manifold import TSNE

        return np.asarray(TSNE(perplexity=min(30, (n - 1) / 3), random_state=seed).fit_transform(reduced))
    if how == "umap":
        try:
            from umap import UMAP
        except ImportError as error:
            raise UserError(
                "UMAP is not installed",
                key="projection",
                value=how,
                fix="pip install 'embedlab[plot]', or tsne",
            ) from error
        return np.asarray(UMAP(n_neighbors=min(15, n - 1), random_state=seed).fit_transform(reduced))
    raise UserError("no such projection", key="projection", value=how, fix="choose tsne or umap")
