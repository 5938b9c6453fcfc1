"""Scoring a retrieval collection in the training loop: nDCG@10 over all of its documents."""

from __future__ import annotations

import torch
from torch import Tensor

from embedlab.evaluation.core.geometry import effective_rank, mean_cosine
from embedlab.evaluation.core.nearest import largest
from embedlab.evaluation.core.protocol import plain_hash
from embedlab.evaluation.core.vectors import unique
from embedlab.evaluation.retrieval.beir import Collection

_DEPTH = 10
_QUERIES = 256  # scored at once


class DevRetrieval:
    """Queries with judged documents, ready to score vectors of their distinct texts.

    Args:
        collection: all of its documents are searched.
        query_prompt, document_prompt: before each text.

    Attributes:
        sentences: the distinct texts, in the order in which `score` wants their vectors.
        metric: the score that selects.
        fingerprint: hex hash of the texts and judgements.
    """

    metric = "ndcg@10"

    def __init__(self, collection: Collection, query_prompt: str = "", document_prompt: str = "") -> None:
        documents = [document_prompt + text for text in collection.documents.values()]
        queries = [query_prompt + collection.queries[name] for name in collection.qrels]
        self.sentences, position = unique([*documents, *queries])
        self._documents = torch.tensor([position[text] for text in documents])
        self._queries = torch.tensor([position[text] for text in queries])
        place = {name: i for i, name in enumerate(collection.documents)}
        judged = [
            (query, place[document], gain)
            for query, gains in enumerate(collection.qrels.values())
            for document, gain in gains.items()
        ]
        self.fingerprint = plain_hash([documents, queries, judged])
        self._judged = torch.tensor([pair[:2] for pair in judged]).T  # [2, n]: query, document
        self._gains = torch.tensor([float(gain) for *_, gain in judged], dtype=torch.float64)
        ideal = [sorted(gains.values(), reverse=True)[:_DEPTH] for gains in collection.qrels.values()]
        self._ideal = torch.cat([_dcg(torch.tensor([gains], dtype=torch.float64)) for gains in ideal])

    def pair_cosines(self, vectors: Tensor) -> Tensor:
        """Cosine of each query and each of its relevant documents [n_judged], on the vectors' device."""
        units = torch.nn.functional.normalize(vectors.float(), dim=-1)
        query, document = self._judged.to(vectors.device)
        index = self._queries.to(query.device)[query], self._documents.to(query.device)[document]
        return (units[index[0]] * units[index[1]]).sum(-1)

    def score(self, vectors: Tensor, geometry: bool = True, rank: bool = True) -> dict[str, float]:
        """Scores of `vectors` [n_unique, D], row i for `sentences[i]`.

        ndcg@10 (x100, cosine, gains linear as trec_eval's) and, with `geometry`, mean_cosine and, with `rank` too,
        effective_rank.
        """
        if vectors.ndim != 2 or vectors.shape[0] != len(self.sentences):
            raise ValueError(f"vectors of shape {tuple(vectors.shape)} for {len(self.sentences)} texts")
        vectors = vectors.detach()
        units = torch.nn.functional.normalize(vectors.float(), dim=-1)
        documents = units[self._documents.to(units.device)]
        found = [
            self._gained(units[self._queries[first : first + _QUERIES].to(units.device)] @ documents.T, first)
            for first in range(0, len(self._queries), _QUERIES)
        ]
        scores = {self.metric: 100 * float((_dcg(torch.cat(found)) / self._ideal).mean())}
        if geometry:
            scores["mean_cosine"] = float(mean_cosine(vectors))
            if rank:
                scores["effective_rank"] = float(effective_rank(vectors))
        return scores

    def _gained(self, cosines: Tensor, first: int) -> Tensor:
        """Gains of the best documents of some queries, of equal ones the first; on the CPU [n, depth]."""
        best = largest(cosines, min(_DEPTH, cosines.shape[1]))[1].cpu()
        gains = torch.zeros(cosines.shape, dtype=torch.float64)
        query, document = self._judged
        here = (query >= first) & (query < first + len(cosines))
        gains[query[here] - first, document[here]] = self._gains[here]
        return gains.gather(1, best)


def _dcg(gains: Tensor) -> Tensor:
    """Discounted gain of ranked gains [n, k]: [n], in float64."""
    return (gains / torch.log2(torch.arange(gains.shape[1], dtype=torch.float64) + 2)).sum(1)
