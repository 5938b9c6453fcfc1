"""InfoNCE in more directions than from anchors to documents, and with a weight on hard candidates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from embedlab.objectives.precision import full_precision, unit
from embedlab.objectives.softmax import Contrast

Directions = Literal["forward", "symmetric", "joint"]
Hardness = Literal["in_batch", "hard", "all"]


@full_precision
def directed_nce(
    views: Sequence[Tensor],
    candidates: Sequence[Tensor],
    tau: float,
    *,
    directions: Directions = "forward",
    hardness: Hardness | None = None,
    strength: float = 0.0,
    offset: int = 0,
    hashes: Sequence[Tensor] | None = None,
    candidate_hashes: Sequence[Tensor] | None = None,
) -> Contrast:
    """The mean over anchors i of ``log Z_i - cos(q_i, d_i) / tau``, d_i the positive of q_i.

    ``forward``: Z has q_i to all documents, as `info_nce`. ``symmetric``: the mean of log Z of that and of d_i to all
    anchors (CLIP: Radford et al. 2021). ``joint``: one Z of q_i to all documents and to the other anchors, and of d_i
    to all anchors and to the documents of others (GTE: Li et al. 2023, arXiv 2308.03281).

    With `hardness` the forward logits of the own hard negatives (``hard``), of others' documents (``in_batch``) or of
    both (``all``) have ``strength * sg(cos)`` added (arXiv 2503.04812, equation 5, strength 9; 2509.20354: 5).

    Args:
        views: ``[B, D]`` each: anchors, positives and any number of negatives, of this rank.
        candidates: ``[M, D]`` each, the same of the whole (gathered) batch; row i of a view is ``offset + i``.
        tau: temperature.
        directions, hardness, strength: as above.
        offset: first row of this rank in the candidates.
        hashes, candidate_hashes: ``[B]`` of each view and ``[M]`` of each of the candidates, equal for equal texts. A
            candidate with the anchor's or its positive's text leaves Z. None: it is a negative.

    Returns:
        The mean over the B anchors; diagnostics of the forward direction.
    """
    v, c = [unit(x) for x in views], [unit(x) for x in candidates]
    row = torch.arange(len(v[0]), device=v[0].device) + offset
    own = torch.arange(len(c[0]), device=row.device) == row[:, None]
    known = None if hashes is None or candidate_hashes is None else (hashes, candidate_hashes)

    def block(left: int, right: int, with_own: bool = True) -> Tensor:
        gone = _absent(own, known, right, with_own)
        return (v[left] @ c[right].T / tau).masked_fill(gone, float("-inf"))

    documents = range(1, len(v))
    cosines = torch.cat([v[0] @ c[k].T for k in documents], 1)
    forward = torch.cat([block(0, k) for k in documents], 1)
    others = torch.cat([~own] * len(documents), 1)
    positive = torch.cat([own] + [torch.zeros_like(own)] * (len(documents) - 1), 1)
    if hardness is not None:
        hard = {"in_batch": others, "hard": ~(others | positive), "all": ~positive}[hardness]
        forward = forward + strength * cosines.detach() * hard
    true = (cosines * positive).sum(1)
    if directions == "symmetric":
        log_z = (forward.logsumexp(1) + block(1, 0).logsumexp(1)) / 2
    elif directions == "joint":
        around = [block(0, 0, with_own=False), block(1, 0), *(block(1, k, with_own=False) for k in documents)]
        log_z = torch.cat([forward, *around], 1).logsumexp(1)
    else:
        log_z = forward.logsumexp(1)
    loss = (log_z - true / tau).mean()
    return _diagnosed(loss, forward, cosines, positive, row)


@torch.no_grad()
def _diagnosed(loss: Tensor, logits: Tensor, cosines: Tensor, positive: Tensor, row: Tensor) -> Contrast:
    """The loss as it is, and what the logits ``[B, C]`` of the forward direction say."""
    negative = ~positive & torch.isfinite(logits)
    near = (cosines * positive).sum(1).mean()
    apart = (cosines * negative).sum() / negative.sum().clamp(min=1)
    return Contrast(loss, near, apart, (logits.argmax(1) == row).float().mean())


def _absent(
    own: Tensor, hashes: tuple[Sequence[Tensor], Sequence[Tensor]] | None, right: int, with_own: bool
) -> Tensor:
    """Candidates of a view that leave Z, ``[B, M]``.

    Args:
        own: where a candidate is of the anchor's row.
        hashes: of views and candidates; None: texts that come again stay.
        right: the candidates' view: an own anchor or positive stays whatever its text; an own negative does not.
        with_own: whether candidates of the anchor's row are any.
    """
    gone = torch.zeros_like(own)
    if hashes is not None:
        (anchors, positives, *_), others = hashes[0], hashes[1][right]
        gone = (others == anchors[:, None]) | (others == positives[:, None])
    if not with_own:
        return gone | own
    return gone & ~own if right < 2 else gone
