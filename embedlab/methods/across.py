"""Contrast within and across twin towers, and what shows whether it acts (JTCSE, arXiv 2505.02366)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from embedlab.distributed.gather import agreed_coin, first_row, gather, gather_ids
from embedlab.objectives.info_nce import Contrast
from embedlab.objectives.pair_nce import pair_nce

if TYPE_CHECKING:
    from embedlab.methods.jtcse_config import JTCSEConfig


class Across:
    """X(a, b) of one step: with candidates of all devices, repeated texts, and the step's coin."""

    def __init__(self, config: JTCSEConfig, ids: Tensor | None) -> None:
        self.config = config
        self.ids = ids
        self._everywhere = config.gather_negatives
        self._all_ids = gather_ids(ids) if ids is not None and self._everywhere else ids
        self._heads: Tensor | None = None

    def within(self, a: Tensor) -> Contrast:
        """X(a, a)."""
        return self._x(a, a)

    def between(self, a: Tensor, b: Tensor) -> Tensor:
        """X(a, b) or X(b, a), as the coin of this step fell for all its terms; or their mean; or the first."""
        if self.config.icnce == "fixed":
            return self._x(a, b).loss
        if self.config.icnce == "symmetric":
            return (self._x(a, b).loss + self._x(b, a).loss) / 2
        if self._heads is None:
            self._heads = agreed_coin(a.device)
        return self._x(torch.where(self._heads, a, b), torch.where(self._heads, b, a)).loss

    def _x(self, a: Tensor, b: Tensor) -> Contrast:
        candidates = gather(b) if self._everywhere else b
        offset = first_row(len(a)) if self._everywhere else 0
        tau = self.config.tau
        return pair_nce(a, candidates, tau, offset=offset, anchor_ids=self.ids, candidate_ids=self._all_ids)


def gradient_norms(terms: dict[str, Tensor], vectors: list[Tensor]) -> dict[str, Tensor]:
    """The norm of each term's gradient at the towers' vectors: what the weights 1 of the terms hide."""
    norms = {}
    for name, term in terms.items():
        found = torch.autograd.grad(term, vectors, retain_graph=True, allow_unused=True)
        parts = [g.float().norm() for g in found if g is not None]
        norms[f"gradient/{name}"] = torch.stack(parts).norm() if parts else torch.zeros_like(term)
    return norms


@torch.no_grad()
def towers_apart(u: Tensor, v: Tensor) -> dict[str, Tensor]:
    """How near the towers are, and whether one outweighs the other in the sum."""
    return {
        "towers/cosine": cosine_similarity(u.float(), v.float()).mean(),
        "towers/cka": linear_cka(u, v),
        "towers/norm_ratio": (u.float().norm(dim=-1) / v.float().norm(dim=-1)).mean(),
    }


@torch.no_grad()
def linear_cka(a: Tensor, b: Tensor) -> Tensor:
    """Linear centred kernel alignment of two sets of vectors of the same rows (Kornblith et al. 2019), in [0, 1]."""
    with torch.autocast(a.device.type, enabled=False):
        a, b = a.float() - a.float().mean(0), b.float() - b.float().mean(0)
        k, m = a @ a.T, b @ b.T
        return (k * m).sum() / (k.norm() * m.norm()).clamp(min=1e-12)
