"""Who is compared with whom in a batch: candidates of one rank or of all, and texts that come again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor

from embedlab.distributed.gather import batch_order, first_row, gather, gather_integers


@dataclass(frozen=True)
class InBatch:
    """The candidates of a step's anchors.

    Args:
        gather_negatives: candidates from all ranks; False keeps each rank to its own batch.
        mask_duplicates: candidates with the anchor's text are known by their hashes; False: they are negatives.
    """

    gather_negatives: bool = True
    mask_duplicates: bool = True

    @overload
    def candidates(self, x: Tensor) -> Tensor: ...
    @overload
    def candidates(self, x: None) -> None: ...
    def candidates(self, x: Tensor | None) -> Tensor | None:
        """Rows of all ranks ``[M, ...]``, rank 0 first: vectors with their gradient, or hashes (None stays None)."""
        if x is None or not self.gather_negatives:
            return x
        return gather(x) if x.is_floating_point() else gather_integers(x)

    def offset(self, x: Tensor) -> int:
        """Where the rows of ``x`` ``[B, ...]`` begin among the candidates."""
        return first_row(len(x)) if self.gather_negatives else 0

    def following(self, candidates: Tensor) -> Tensor:
        """``[M]``: of each candidate the one that comes after it in the batch, which is a ring."""
        rows, device = len(candidates), candidates.device
        order = batch_order(rows, device) if self.gather_negatives else torch.arange(rows, device=device)
        return torch.empty_like(order).scatter_(0, order, order.roll(-1))

    def text_hashes(self, view: dict[str, Any]) -> Tensor | None:
        """``[B]`` of a view, equal for equal texts; None where a text that comes again is a negative."""
        return view.get("hash") if self.mask_duplicates else None
