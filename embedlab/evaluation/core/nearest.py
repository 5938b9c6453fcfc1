"""Exact nearest neighbours in blocks: the scores of all queries against all documents never exist at once."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embedlab.encoders.codes import Codes
from embedlab.errors import UserError

Backend = Literal["torch", "faiss"]
BACKENDS: tuple[Backend, ...] = ("torch", "faiss")
RESCORE = 4
"""Candidates an answer by Hamming distance, of which the float query takes the best."""
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
            scores, rows = largest(self.queries @ block.to(self.queries).T, k)
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


def largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` largest of each row of [q, n] and their columns, falling; of equal ones the first.

    `Tensor.topk` says nothing of equal values, and which of them it takes changes with n.
    """
    values, columns = scores.topk(min(k + 1, scores.shape[1]), dim=1)
    if values.shape[1] > k:
        unclear = (values[:, k - 1] == values[:, k]).nonzero()[:, 0]
        values, columns = values[:, :k].clone(), columns[:, :k].clone()
        if len(unclear):
            whole = scores[unclear].sort(dim=1, descending=True, stable=True)
            values[unclear], columns[unclear] = whole.values[:, :k], whole.indices[:, :k]
    return values, columns


class CodesTopK:
    """`TopK` over codes of documents, which stay codes: of 8 bits or floats scored as they are, of a bit a feature
    the ``k * rescore`` nearest by Hamming distance, of which the float query then takes the best.

    Args:
        queries: [q, D], floats that are never quantised.
        codes: of the documents.
        k: documents a query.
        rescore: candidates for each of the `k`; only codes of a bit a feature need any.

    Raises:
        UserError: a count below 1.
    """

    def __init__(self, queries: Tensor, codes: Codes, k: int, rescore: int = RESCORE) -> None:
        if rescore < 1:
            raise UserError("must be a positive whole number", key="rescore", value=rescore, fix="rescore=4")
        self.queries, self.codes, self.k, self.rescore = queries, codes, k, rescore
        scale, offset = (torch.from_numpy(x).to(queries) for x in (codes.scale, codes.offset))
        self._top = TopK(queries * scale, k)
        self._bias = queries @ offset
        self._bits = _words(Codes("ubinary", codes.dim).encode(queries.cpu().numpy()))
        self._nearest = torch.empty(len(queries), 0, dtype=torch.int64)  # distance and row in one number
        self._blocks: list[NDArray[Any]] = []

    def add(self, codes: NDArray[Any]) -> None:
        """One more block of documents, [n, `codes.width`]; a memory map is read again for the candidates."""
        if not self.codes.packed:
            self._top.add(torch.from_numpy(self.codes.levels(codes)))
            return
        first = sum(map(len, self._blocks))
        self._blocks.append(codes)
        flipped = np.uint8(0x80 if self.codes.store == "binary" else 0)
        words = np.ascontiguousarray(_words(codes.view(np.uint8) ^ flipped).T)
        step = max(1, _SCORES_AT_ONCE // 2 // max(1, len(self.queries)))  # a key has the bytes of two floats
        for start in range(0, words.shape[1], step):
            some = words[:, start : start + step]
            rows = np.arange(some.shape[1]) + (first + start)
            keys = self._nearest.new_empty(len(self.queries), self._nearest.shape[1] + len(rows))
            keys[:, : -len(rows)] = self._nearest
            for key, query in zip(keys.numpy(), self._bits, strict=True):
                key[-len(rows) :] = (_ones(some ^ query[:, None]) << _ROW_BITS) + rows
            k = min(self.k * self.rescore, keys.shape[1])
            self._nearest = keys.topk(k, dim=1, largest=False).values

    def result(self) -> tuple[Tensor, Tensor]:
        """Scores, falling, and rows of the documents, [q, min(k, documents)] each."""
        if not self.codes.packed:
            return self._top.scores + self._bias[:, None], self._top.rows
        rows = (self._nearest & ((1 << _ROW_BITS) - 1)).sort(dim=1).values
        starts = np.cumsum([0, *map(len, self._blocks)])
        scores = torch.empty(rows.shape)
        for i, (query, wanted) in enumerate(zip(self.queries.cpu().numpy(), rows.numpy(), strict=True)):
            bounds = wanted.searchsorted(starts)
            for block, start, first, end in zip(self._blocks, starts, bounds, bounds[1:], strict=False):
                if end > first:
                    codes = block[wanted[first:end] - start]
                    scores[i, first:end] = torch.from_numpy(self.codes.scores(query[None], codes)[0])
        scores, order = scores.sort(dim=1, descending=True, stable=True)
        return scores[:, : self.k], rows.gather(1, order)[:, : self.k]


_ROW_BITS = 40
"""Of a key that has a document's distance above its row."""


def _words(codes: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Bytes [n, W] as words [n, ceil(W / 8)], filled up with zeros."""
    padded = np.zeros((len(codes), -(-codes.shape[1] // 8) * 8), np.uint8)
    padded[:, : codes.shape[1]] = codes
    return padded.view(np.uint64)


def _ones(words: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Bits that are set in each column of [W, n]."""
    if hasattr(np, "bitwise_count"):  # numpy 2
        return np.bitwise_count(words).sum(axis=0, dtype=np.int64)
    rows = np.ascontiguousarray(words.T).view(np.uint8)
    return _ONES_OF_BYTE[rows].sum(axis=1, dtype=np.int64)


_ONES_OF_BYTE = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(axis=1, dtype=np.uint8)
