"""Exact nearest neighbours in blocks: the scores of all queries against all documents never exist at once."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from embedlab.errors import UserError

Backend = Literal["torch", "faiss"]
BACKENDS: tuple[Backend, ...] = ("torch", "faiss")
_SCORES_AT_ONCE = 1 << 24  # floats of one [queries, block] score matrix: 64 MiB


def unit(vectors: Tensor) -> Tensor:
    """Rows [n, D] at length one in float32, so that inner products are cosines; a zero row stays zero."""
    return torch.nn.functional.normalize(vectors.float(), dim=-1)


class TopK:
    """The `k` documents with the largest inner product of each query, over documents that come in blocks.

    queries: [q, D]; `add` takes [n, D] and numbers the documents from 0 in the order in which they came.
    Of equal scores the document that came first is kept.
    Raises UserError when the backend is faiss (`IndexFlatIP`'s exact search) and faiss is not installed.
    """

    def __init__(self, queries: Tensor, k: int, backend: Backend = "torch") -> None:
        if k < 1:
            raise UserError("must be a positive whole number", key="k", value=k, fix="k=10")
        self._faiss = _faiss() if backend == "faiss" else None
        self.queries = queries
        self.k = k
        self.documents = 0
        self.scores = queries.new_empty(len(queries), 0)  # [q, min(k, documents)], falling
        self.rows = torch.empty(len(queries), 0, dtype=torch.int64, device=queries.device)

    def add(self, documents: Tensor) -> None:
        """Search one more block of documents [n, D]."""
        step = max(1, _SCORES_AT_ONCE // max(1, len(self.queries)))
        for block in documents.split(step):
            if len(block):
                self._merge(*self._best(block))

    def _best(self, block: Tensor) -> tuple[Tensor, Tensor]:
        k = min(self.k, len(block))
        if self._faiss is not None:
            metric = self._faiss.METRIC_INNER_PRODUCT
            queries, base = self.queries.cpu().numpy(), block.cpu().numpy()
            scores, rows = self._faiss.knn(queries, base, k, metric=metric)
            device = self.queries.device
            scores, rows = torch.from_numpy(scores).to(device), torch.from_numpy(rows).to(device)
        else:
            scores, rows = (self.queries @ block.to(self.queries).T).topk(k, dim=1)
        first = self.documents
        self.documents += len(block)
        return scores, rows + first

    def _merge(self, scores: Tensor, rows: Tensor) -> None:
        # Sorted by row first: the stable sort by score then leaves the earlier of equal documents in front.
        order = rows.argsort(dim=1)
        scores = torch.cat([self.scores, scores.gather(1, order)], dim=1)
        rows = torch.cat([self.rows, rows.gather(1, order)], dim=1)
        scores, order = scores.sort(dim=1, descending=True, stable=True)
        self.scores, self.rows = scores[:, : self.k], rows.gather(1, order)[:, : self.k]


def _faiss():  # type: ignore[no-untyped-def]
    try:
        import faiss
    except ImportError as error:
        raise UserError(
            "faiss is not installed", key="index", value="faiss", fix="pip install faiss-cpu, or index=torch"
        ) from error
    return faiss
