"""An objective of the first columns of vectors too (Matryoshka: Kusupati et al. 2022, arXiv 2205.13147, equation 1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from embedlab.objectives.softmax import Contrast

L = TypeVar("L", Tensor, Contrast)


def nested(objective: Callable[[int], L], dims: Sequence[int], weights: Sequence[float]) -> L:
    """``sum over d of w_d L_d``, with L_d the objective of vectors cut to their first d columns.

    Args:
        objective: a number of columns d -> L_d; it is to normalise what it has cut.
        dims: the d.
        weights: the w_d.

    Returns:
        The sum; of a `Contrast` the diagnostics are those of the most columns.
    """
    found = [objective(d) for d in dims]
    whole = found[max(range(len(dims)), key=dims.__getitem__)]
    losses = [part if isinstance(part, Tensor) else part.loss for part in found]
    total = torch.stack([w * loss for w, loss in zip(weights, losses, strict=True)]).sum()
    return total if isinstance(whole, Tensor) else whole._replace(loss=total)
