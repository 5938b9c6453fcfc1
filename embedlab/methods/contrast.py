"""InfoNCE between the views of a batch, over all devices: the settings and the calls that methods share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from embedlab.config.backbone import BackboneInfo
from embedlab.config.build import within
from embedlab.config.run import MethodConfig, RunConfig
from embedlab.data.plan import random_bits
from embedlab.distributed.in_batch import InBatch
from embedlab.errors import UserError
from embedlab.objectives.info_nce import info_nce
from embedlab.objectives.matryoshka import nested
from embedlab.objectives.pair_nce import interleave, pair_nce
from embedlab.objectives.softmax import Contrast
from embedlab.pooling import build_pooling

L = TypeVar("L", Tensor, Contrast)


@dataclass(frozen=True)
class Matryoshka:
    """An objective of the first columns of the vectors too (Kusupati et al. 2022).

    Args:
        dims: numbers of columns, the whole width among them; None: the whole width alone.
        weights: of the objective of each (None: 1).
        dims_per_step: how many of them a step has, drawn from the run's seed and the step; -1: all.
    """

    dims: tuple[int, ...] | None = None
    weights: tuple[float, ...] | None = None
    dims_per_step: int = -1

    def check(self, width: int) -> list[str]:
        """Warnings, of an encoder with vectors of this width.

        Raises:
            UserError: dims that the vectors have not, or that are not told from each other.
        """
        key = "method.matryoshka"
        fix = f"{key}.dims=[{width},{width // 2}]"
        if self.dims is None:
            if self.weights is not None or self.dims_per_step != -1:
                raise UserError("there are no dims", key=f"{key}.dims", fix=fix)
            return []
        if not self.dims or len(set(self.dims)) < len(self.dims) or min(self.dims) < 1:
            problem = "not numbers of columns, each once"
            raise UserError(problem, key=f"{key}.dims", value=list(self.dims), fix=fix)
        if max(self.dims) > width:
            problem = f"{max(self.dims)} exceeds width {width}"
            raise UserError(problem, key=f"{key}.dims", value=list(self.dims), fix=fix)
        if self.weights is not None and (len(self.weights) != len(self.dims) or not min(self.weights) > 0):
            problem = "must be positive"
            if len(self.weights) != len(self.dims):
                problem = f"{len(self.weights)} for {len(self.dims)} dims"
            fix = f"null, or one for each of the dims: [{','.join('1' for _ in self.dims)}]"
            raise UserError(problem, key=f"{key}.weights", value=list(self.weights), fix=fix)
        if self.dims_per_step != -1 and not 1 <= self.dims_per_step <= len(self.dims):
            raise UserError(
                f"there are {len(self.dims)} dims",
                key=f"{key}.dims_per_step",
                value=self.dims_per_step,
                fix="-1 for all",
            )
        whole = max(self.dims) == width
        return [] if whole else [f"{key}.dims: columns past {max(self.dims)} of {width} are not trained"]

    def drawn(self, seed: int, step: int) -> Matryoshka:
        """That of one step: ``dims_per_step`` of the dims."""
        if self.dims is None or self.dims_per_step == -1:
            return self
        order = np.argsort(random_bits(seed, step, np.arange(len(self.dims)), stream=0))
        chosen = sorted(order[: self.dims_per_step].tolist())
        weights = None if self.weights is None else tuple(self.weights[i] for i in chosen)
        return Matryoshka(tuple(self.dims[i] for i in chosen), weights)

    def __call__(self, objective: Callable[..., L], *vectors: Tensor) -> L:
        """``objective(*vectors)``, summed over the dims: of vectors ``[..., D]`` cut to each."""
        if self.dims is None:
            return objective(*vectors)
        weights = self.weights or [1.0] * len(self.dims)
        return nested(lambda d: objective(*(v[..., :d] for v in vectors)), self.dims, weights)


@dataclass(frozen=True)
class ContrastConfig(MethodConfig):
    """Of a method that compares a sentence with the others of its batch."""

    draws_dims: ClassVar[bool] = False
    """Whether a step may have some of Matryoshka's dims only."""

    tau: float = within(0.05, above=0)
    """Temperature: cosines are divided by it."""
    mask_duplicates: bool = True
    """A candidate with the anchor's or its positive's text is no negative; False as released."""
    gather_negatives: bool = True
    """Negatives from all devices; False keeps each device to its own batch."""
    matryoshka: Matryoshka = Matryoshka()
    """The contrast of the first columns of the vectors too."""

    @property
    def needs_others(self) -> bool:
        return True

    @property
    def nests(self) -> bool:
        """Whether its contrast is that of `contrast` and its like, which Matryoshka's dims cut."""
        return True

    @property
    def in_batch(self) -> InBatch:
        return InBatch(self.gather_negatives, self.mask_duplicates)

    def check(self, info: BackboneInfo, run: RunConfig) -> list[str]:
        if run.data.pack is not None:
            raise UserError("contrastive views are single sentences", key="data.pack", fix="data.pack=null")
        if self.matryoshka.dims is not None and not self.nests:
            raise UserError(
                f"the loss of method={self.name} here is of whole vectors alone", key="method.matryoshka.dims",
                value=list(self.matryoshka.dims), fix="null, or a method with an in-batch contrast",
            )  # fmt: skip
        if self.matryoshka.dims_per_step != -1 and not self.draws_dims:
            raise UserError(
                f"method={self.name} has all dims in every step", key="method.matryoshka.dims_per_step",
                value=self.matryoshka.dims_per_step, fix="-1",
            )  # fmt: skip
        return super().check(info, run) + self.matryoshka.check(self.width(info, run))

    def width(self, info: BackboneInfo, run: RunConfig) -> int:
        """Of the vectors that are contrasted."""
        return build_pooling(run.pooling, info).dim


def check_dropout(method: str, info: BackboneInfo) -> None:
    """Of a method whose two views are one text.

    Raises:
        UserError: nothing makes them differ.
    """
    if info.dropout == 0.0 and info.adapter_dropout == 0.0:
        raise UserError(
            f"the two views of method={method} differ by dropout alone, and this backbone has none",
            key="backbone.dropout",
            value=info.dropout,
            fix="backbone.dropout=0.1, or a method whose views differ by themselves",
        )


def contrast(
    vectors: Sequence[Tensor],
    hashes: Sequence[Tensor | None],
    config: ContrastConfig,
    hard_negative_weight: float = 0.0,
) -> Contrast:
    """Each anchor against the positives and hard negatives of the batch; a row softmax (`info_nce`).

    Args:
        vectors: ``[B, D]`` each: anchors, their positives and any number of hard negatives.
        hashes: ``[B]`` of each view, equal for equal texts; None: a text that comes again is a negative.
        config: temperature, and which candidates there are.
        hard_negative_weight: added to the logit of an anchor's own hard negative.

    Returns:
        The mean over this rank's anchors.
    """
    batch = config.in_batch
    candidates = [batch.candidates(v) for v in vectors[1:]]
    texts = [batch.candidates(h) for h in hashes[1:]]

    def objective(anchors: Tensor, positives: Tensor, *negatives: Tensor) -> Contrast:
        return info_nce(
            anchors,
            positives,
            config.tau,
            offset=batch.offset(anchors),
            hard_negatives=stacked_negatives(negatives),
            hard_negative_weight=hard_negative_weight,
            anchor_hashes=hashes[0],
            candidate_hashes=texts[0],
            hard_negative_hashes=stacked_negatives(texts[1:]),
        )

    return config.matryoshka(objective, vectors[0], *candidates)


def stacked_negatives(parts: Sequence[Tensor | None]) -> Tensor | None:
    """``[M, ...]`` of one hard negative, ``[n, M, ...]`` of several; None where there are none."""
    there = [part for part in parts if part is not None]
    return None if not there else there[0] if len(there) == 1 else torch.stack(there)


def contrast_pairs(
    vectors: Sequence[Tensor],
    hashes: Sequence[Tensor | None],
    config: ContrastConfig,
    positive: Tensor | None = None,
) -> Contrast:
    """Each view against its partner and all views of the other sentences (NT-Xent, `pair_nce`).

    Args:
        vectors: ``[B, D]`` each: first and second views.
        hashes, config: as in `contrast`.
        positive: bool ``[B]``, sentences whose views are a positive pair; None: all.

    Returns:
        The mean over this rank's 2B rows.
    """
    rows, texts = interleave(*vectors), interleaved_hashes(*hashes)
    kept = None if positive is None else interleave(positive, positive)
    return contrast_rows(rows, rows, texts, config.in_batch.candidates(texts), config, kept)


def contrast_rows(
    anchors: Tensor,
    others: Tensor,
    hashes: Tensor | None,
    candidate_hashes: Tensor | None,
    config: ContrastConfig,
    kept: Tensor | None = None,
) -> Contrast:
    """`pair_nce` over all devices.

    Args:
        anchors: ``[2B, D]``, interleaved views.
        others: ``[2B, D]``, the same rows of this device by the same or another encoder.
        hashes: ``[2B]``, equal for equal texts; None: a text that comes again is a negative.
        candidate_hashes: those of all devices.
        kept: bool ``[2B]``, rows whose partner is a positive; None: all.
        config: temperature, and which candidates there are.

    Returns:
        The mean over this rank's rows.
    """
    batch = config.in_batch

    def objective(rows: Tensor, candidates: Tensor) -> Contrast:
        return pair_nce(
            rows, candidates, config.tau, offset=batch.offset(rows), kept=kept,
            anchor_hashes=hashes, candidate_hashes=candidate_hashes,
        )  # fmt: skip

    return config.matryoshka(objective, anchors, batch.candidates(others))


def interleaved_hashes(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """``[2B]`` of two views in the order of `interleave`; None where a text that comes again is a negative."""
    return None if first is None or second is None else interleave(first, second)
