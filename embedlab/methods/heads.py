"""Heads on the sentence vector that exist while training only."""

from __future__ import annotations

from typing import Literal

from torch import nn

from embedlab.pooling.one_token import new_dense

Head = Literal["train", "bn2", "none"]
"""``train``: SimCSE's Linear + tanh. ``bn2``: the projector of DiffCSE and InfoCSE. ``none``: the vector itself."""


def new_head(kind: Head, width: int) -> nn.Module:
    """A new head: ``[R, D]``, the rows of all views, to ``[R, D]``."""
    if kind == "train":
        return mlp_head(width)
    return bn2_head(width) if kind == "bn2" else nn.Identity()


def mlp_head(width: int) -> nn.Sequential:
    """Linear + tanh, new: SimCSE's MLP."""
    return nn.Sequential(new_dense(width), nn.Tanh())


def bn2_head(width: int) -> nn.Sequential:
    """Two layers with batch normalization, the last without scale and shift (DiffCSE's projector, as released).

    Means and variances are those of the rows at hand, of this rank; none are kept, since the head is dropped.
    """
    return nn.Sequential(
        nn.Linear(width, 2 * width, bias=False),
        nn.BatchNorm1d(2 * width, track_running_stats=False),
        nn.ReLU(),
        nn.Linear(2 * width, width, bias=False),
        nn.BatchNorm1d(width, affine=False, track_running_stats=False),
    )
