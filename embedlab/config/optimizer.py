"""How weights are updated: AdamW and its schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from embedlab.errors import UserError

Schedule = Literal["linear", "constant", "cosine"]


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with clipping; the defaults are those of Hugging Face's trainer, which SimCSE's recipe relies on."""

    lr: float = 3e-5
    weight_decay: float = 0.0
    decay_norms_and_biases: bool | None = None
    """Whether weight decay also acts on norms and biases; None: as the method's release has it
    (`MethodConfig.decays_norms_and_biases`)."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    schedule: Schedule = "linear"
    """Of the learning rate after the warm-up: ``linear`` and ``cosine`` fall to 0 at the last step."""
    warmup_steps: int = 0
    clip: float | None = 1.0
    """Largest norm of the whole gradient; None does not clip."""
    accumulate: int = 1
    """Batches added up before an update. This adds no in-batch negatives."""
    chunk: int | None = None
    """Rows that are encoded at once: a contrastive batch of any size in the memory of one chunk, with the
    gradients of the whole (GradCache), for one more forward pass. None: all at once."""

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise UserError("the learning rate must be positive", key="optimizer.lr", value=self.lr)
        betas = tuple(self.betas)
        if len(betas) != 2 or not all(0 <= b < 1 for b in betas):
            raise UserError(
                "must be two numbers from 0 up to 1",
                key="optimizer.betas",
                value=list(betas),
                fix="[0.9,0.999]",
            )
        if not 0 < self.eps < math.inf:
            raise UserError("must be positive", key="optimizer.eps", value=self.eps, fix="1e-8")
        if not 0 <= self.weight_decay < math.inf:
            raise UserError("must not be negative", key="optimizer.weight_decay", value=self.weight_decay)
        if self.schedule not in ("linear", "constant", "cosine"):
            raise UserError(
                "unknown schedule",
                key="optimizer.schedule",
                value=self.schedule,
                fix="linear, constant or cosine",
            )
        if self.warmup_steps < 0:
            raise UserError("must not be negative", key="optimizer.warmup_steps", value=self.warmup_steps)
        if self.clip is not None and not self.clip > 0:
            raise UserError(
                "the clipping norm must be positive",
                key="optimizer.clip",
                value=self.clip,
                fix="null for none",
            )
        if self.accumulate < 1:
            raise UserError("must be at least 1", key="optimizer.accumulate", value=self.accumulate)
        if self.chunk is not None and self.chunk < 1:
            raise UserError("must be at least 1, or null", key="optimizer.chunk", value=self.chunk)
        object.__setattr__(self, "betas", (float(self.betas[0]), float(self.betas[1])))
